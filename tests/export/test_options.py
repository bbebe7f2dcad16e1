"""Options of an export, and the settings that follow."""

import pytest

from mdps.export import ExportOptions
from mdps.runtime.errors import UsageError


def test_choices_of_the_score_and_the_masked_pass_reach_the_settings() -> None:
    chosen = ExportOptions(smoothing_sigma=1.0, top=7, feature_size=96, masked_guidance_scale=5.0).settings((64, 64))
    assert (chosen.score.smoothing_sigma, chosen.score.smoothing_kernel) == (1.0, 9)
    assert (chosen.score.top, chosen.score.feature_size) == (7, 96)
    assert [one.guidance_scale for one in chosen.sampler.passes] == [100.0, 5.0]
    assert ExportOptions(smoothing_sigma=0.0, preset="mvtec/bottle").settings((64, 64)).score.smoothing_kernel == 1
    with pytest.raises(UsageError, match="there is none"):
        ExportOptions(mask_pass=False, masked_guidance_scale=5.0).settings((64, 64))


def test_options_change_a_method_where_they_fit() -> None:
    both = ExportOptions(method="autoddpm", steps=20).settings((64, 64)).sampler.passes
    assert [(one.noise_level, one.steps, one.resamples) for one in both] == [(200, 20, 1), (50, 5, 5)]
    deeper = ExportOptions(method="autoddpm", noise_level=300, steps=30).settings((64, 64)).sampler.passes
    assert [one.noise_level for one in deeper] == [300, 50]
    for options, words in (
        (ExportOptions(method="autoddpm", steps=10), "other --steps"),
        (ExportOptions(method="ddad", steps=10), "skip of 25"),
        (ExportOptions(method="ddad", preset="mvtec/bottle"), "leave one out"),
        (ExportOptions(method="patchcore"), "there is no method"),
    ):
        with pytest.raises(UsageError, match=words):
            options.settings((64, 64))
    ddad = ExportOptions(method="ddad").settings((256, 256)).score
    assert (ddad.smoothing_sigma, ddad.smoothing_kernel, ddad.top) == (4.0, 33, 1)
