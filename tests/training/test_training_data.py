"""Training data: sources, what is drawn for each sample, and mistakes told before the first step."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.runtime.errors import ImageError, UsageError
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.training import ArraySource, CropsSource, FileSource, fit, small_recipe
from mdps.training.draw import draw_batch, draw_timestep, image_index, to_unit, vary
from mdps.training.progress import Reconstructions
from mdps.training.sources import images_below
from mdps.training.state import TrainingState

CPU = torch.device("cpu")


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Twelve colour images of 16 x 16."""
    rng = np.random.default_rng(3)
    for index in range(12):
        write(tmp_path / "good" / f"{index:02d}.png", rng.integers(0, 256, (16, 16, 3)))
    return tmp_path / "good"


# ---- sources


def test_a_folder_is_seen_as_the_detector_sees_it(tmp_path):
    rng = np.random.default_rng(1)
    for name in ("b.png", "a.PNG", "sub/c.bmp", ".hidden.png"):
        write(tmp_path / name, rng.integers(0, 256, (20, 30, 3)))
    (tmp_path / "notes.txt").write_text("no image")
    preprocessing = Preprocessing(image_size=(8, 8))
    source = FileSource(images_below(tmp_path), preprocessing)
    assert [path.name for path in images_below(tmp_path)] == ["a.PNG", "b.png", "c.bmp"]
    np.testing.assert_allclose(
        to_unit(torch.from_numpy(source.images))[1].numpy(), preprocessing(tmp_path / "b.png"), atol=1e-6
    )
    listed = FileSource([tmp_path / "b.png", tmp_path / "a.PNG"], preprocessing)
    np.testing.assert_array_equal(listed.images[0], source.images[1])


def test_crops_come_from_everywhere_in_the_picture():
    picture = np.arange(12 * 10, dtype=np.uint8).reshape(12, 10, 1).repeat(3, axis=2)
    source, rng = CropsSource([picture], 8), np.random.default_rng(0)
    crops = [source.image(0, rng) for _ in range(500)]
    corners = {divmod(int(crop[0, 0, 0]), 10) for crop in crops}
    assert corners == {(y, x) for y in range(5) for x in range(3)}
    for crop in crops:
        y, x = divmod(int(crop[0, 0, 0]), 10)
        assert (crop == picture[y : y + 8, x : x + 8]).all()


# ---- what a sample is


def test_the_recipe_draws_seventy_percent_of_the_timesteps_below_260():
    def drawn(config):
        rng = np.random.default_rng(0)
        return np.array([draw_timestep(config, rng, 1000) for _ in range(20_000)])

    low = drawn(small_recipe())
    assert (low.min(), low.max()) == (0, 999)
    assert (low < 260).mean() == pytest.approx(0.7 + 0.3 * 0.26, abs=0.01)
    assert drawn(replace(small_recipe(), low_share=0.0)).mean() == pytest.approx(499.5, abs=8)


def test_every_epoch_shows_every_image_once_in_an_order_of_its_own():
    epochs = [[image_index(0, 10 * epoch + place, 10) for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [image_index(1, place, 10) for place in range(10)] != epochs[0]
    assert image_index(0, 25, 10) == epochs[2][5]  # also without having been asked for those before


def test_a_sample_is_the_same_whichever_batch_it_is_in(tiny_images, tiny_config):
    source = ArraySource(tiny_images)
    whole = draw_batch(tiny_config, source, range(8, 16), 1000, CPU)
    for first in (8, 12):
        part = draw_batch(tiny_config, source, range(first, first + 4), 1000, CPU)
        for ours, theirs in zip(part, whole, strict=True):
            assert torch.equal(ours, theirs[first - 8 : first - 4])
    assert len({tuple(noise.flatten()[:4].tolist()) for noise in whole.noise}) == 8
    assert whole.noise.std() == pytest.approx(1, abs=0.1)
    other = draw_batch(replace(tiny_config, seed=1), source, range(8, 16), 1000, CPU)
    assert not torch.equal(other.noise, whole.noise)


def test_images_and_weights_lie_alike_in_memory(tiny_images, tiny_config):
    # Where they differ, torch's convolutions take a hundred times as long on some CPUs.
    batch = draw_batch(tiny_config, ArraySource(tiny_images), range(4), 1000, CPU)
    shown = Reconstructions(replace(tiny_config, samples=2), ArraySource(tiny_images), NoiseSchedule.linear(), CPU)
    state = TrainingState(tiny_config, CPU)
    for tensor in (batch.clean, batch.noise, shown.clean, shown.noise, *state.network.parameters()):
        assert tensor.is_contiguous()


def test_simplex_noise_is_the_runtimes_and_each_samples_own(tiny_images, tiny_config):
    config = replace(tiny_config, noise="simplex")
    noise = draw_batch(config, ArraySource(tiny_images), range(200), 1000, CPU).noise
    again = draw_batch(config, ArraySource(tiny_images), range(50, 52), 1000, CPU).noise
    assert torch.equal(again, noise[50:52])
    assert noise.mean() == pytest.approx(0, abs=0.2)
    assert noise.std() == pytest.approx(1, abs=0.1)
    neighbours = (noise[..., 1:] * noise[..., :-1]).mean() / noise.square().mean()
    assert neighbours > 0.5  # structured, where gaussian noise has 0


def test_variations_are_mirrorings_turns_and_small_shifts(tiny_images, tiny_config):
    rng = np.random.default_rng(0)
    still = replace(tiny_config, flip_horizontal=False, shift=0)
    image = tiny_images[0]
    assert vary(image, rng, still) is image
    flips = replace(still, flip_horizontal=True, flip_vertical=True)
    turns = replace(still, rotate=True)
    for config, options in (
        (flips, [image, image[::-1], image[:, ::-1], image[::-1, ::-1]]),
        (turns, [np.rot90(image, quarter) for quarter in range(4)]),
    ):
        seen = [vary(image, rng, config) for _ in range(60)]
        assert {next(i for i, option in enumerate(options) if (one == option).all()) for one in seen} == {0, 1, 2, 3}
    wide = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    windows = [wide[y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
    moved = [vary(image, rng, replace(still, shift=2)) for _ in range(200)]
    assert {next(i for i, window in enumerate(windows) if (one == window).all()) for one in moved} == set(range(25))


# ---- mistakes


def test_data_mistakes_are_told_before_the_first_step(tmp_path, tiny_images, tiny_config):
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        fit(tmp_path / "nowhere", run, tiny_config, device="cpu")
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(UsageError, match=r"data holds 0 images \(\.bmp, \.jpeg, .*\.webp\); training needs"):
        fit(data, run, tiny_config, device="cpu")
    write(data / "0.png", tiny_images[0])
    with pytest.raises(UsageError, match=r"data holds 1 image \("):
        fit(data, run, tiny_config, device="cpu")
    (data / "broken.png").write_bytes((data / "0.png").read_bytes()[:40])
    (data / "empty.jpg").write_bytes(b"")
    with pytest.raises(ImageError, match=r"2 of 3 training images cannot be read: .*broken\.png.*empty\.jpg"):
        fit(data, run, tiny_config, device="cpu")
    with pytest.raises(UsageError, match="at least 2 images"):
        fit(tiny_images[:1], run, tiny_config, device="cpu")
    with pytest.raises(UsageError, match="must be uint8"):
        ArraySource(tiny_images.astype(np.float32))
    with pytest.raises(UsageError, match="7 x 7 pixels do not fit"):
        fit(tiny_images[:, :7, :7], run, tiny_config, device="cpu")
    with pytest.raises(UsageError, match="cannot be turned"):
        fit(tiny_images[:, :4], run, replace(tiny_config, rotate=True), device="cpu")
    assert not run.exists()


def sentences(folder, size=16):
    """Return the warnings before the first step; a refusal of the network's size keeps it from beginning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from mdps.training.loop import as_source

        as_source(folder, Preprocessing(image_size=(size, size)), small_recipe())
    return [str(warning.message) for warning in caught]


def test_usual_images_are_nothing_to_talk_about(folder):
    assert sentences(folder) == []


def test_what_is_odd_is_said_in_one_sentence_each(folder):
    rng = np.random.default_rng(4)
    write(folder / "wide.png", rng.integers(0, 256, (16, 40, 3)))
    write(folder / "grey.png", rng.integers(0, 256, (16, 16)))
    Image.fromarray(rng.integers(0, 1024, (16, 16)).astype(np.uint16)).save(folder / "deep.png")
    (folder / "zz_copy.png").write_bytes((folder / "03.png").read_bytes())
    write(folder / "black.png", np.zeros((16, 16, 3)))
    said = sentences(folder)
    for start, words in (
        ("the training images have 2 sizes (16 of 16 x 16, 1 of 40 x 16; wide.png is unlike most)", "distorts"),
        ("1 of 17 training images has more than 8 bits (such as deep.png)", "convert them to 8 bits"),
        ("3 of 17 training images are grey and the others in colour (black.png", "rarer"),
        ("1 of 17 training images is a copy of another (such as zz_copy.png of 03.png): it adds", "weight"),
        ("1 of 17 training images shows one colour only (such as black.png)", "take it out"),
    ):
        found = [sentence for sentence in said if sentence.startswith(start)]
        assert len(found) == 1, (start, said)
        assert words in found[0]
    assert len(said) == 5
    assert all(sentence.count(". ") == 0 for sentence in said)


def test_one_grey_image_is_one(folder):
    write(folder / "grey.png", np.random.default_rng(4).integers(0, 256, (16, 16)))
    (said,) = sentences(folder)
    assert said.startswith("1 of 13 training images is grey and the others in colour (grey.png is of the rarer kind)")


def test_floats_from_0_to_255_are_no_deep_integers(folder):
    pixels = np.random.default_rng(6).integers(0, 256, (16, 16)).astype(np.float32)
    for name in ("a_float.tiff", "b_float.tiff"):
        Image.fromarray(pixels).save(folder / name)
    said = sentences(folder)
    assert not [sentence for sentence in said if "8 bits" in sentence]
    assert [sentence for sentence in said if sentence.startswith("2 of 14 training images are grey")]
    assert [sentence for sentence in said if sentence.startswith("1 of 14 training images is a copy")]


def test_other_sizes_of_one_aspect_distort_nothing(folder):
    write(folder / "large.png", np.random.default_rng(5).integers(0, 256, (32, 32, 3)))
    (said,) = sentences(folder)
    assert "2 sizes" in said
    assert "distorts" not in said


def test_images_much_smaller_than_the_network_are_named(folder):
    (said,) = sentences(folder, 64)
    assert "12 of 12 training images are much smaller than the 64 x 64" in said
    assert "00.png, 16 x 16" in said
    assert sentences(folder, 32) == []


def test_three_images_are_few(folder, tmp_path):
    for index in range(3):
        (tmp_path / "few").mkdir(exist_ok=True)
        (folder / f"{index:02d}.png").rename(tmp_path / "few" / f"{index}.png")
    (said,) = sentences(tmp_path / "few")
    assert "only 3 training images" in said
    assert "by heart" in said
