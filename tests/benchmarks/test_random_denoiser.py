"""The untrained denoiser that timings of the authors' size use."""

from pathlib import Path

import pytest

from mdps.benchmarks.random_denoiser import main
from mdps.models.checkpoints import load_denoiser


def test_has_the_authors_size_and_repeats(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(["--out", str(tmp_path / name), "--image-size", "64", "--base", "32"]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    config = load_denoiser(tmp_path / "a").config
    assert (config.image_size, config.channel_mult, config.resblock_updown) == (64, (1, 1, 2, 2, 4, 4), True)


@pytest.mark.parametrize("wrong", [["--image-size", "100"], ["--base", "20"]])
def test_a_size_that_no_network_has_is_one_sentence(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "a"), *wrong]) == 2
    assert "must be a multiple of" in capsys.readouterr().err
