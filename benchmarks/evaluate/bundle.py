"""A bundle as a predictor of test pictures, its passes changed where no new export is needed."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Self, Unpack

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.data.samples import Box
from mdps.benchmarks.evaluate.predictions import Prediction
from mdps.runtime.bundle import Bundle, LoadFields, LoadOptions
from mdps.runtime.calibration import Calibration, exit_limit
from mdps.runtime.detector import Detector, Result
from mdps.runtime.engines import wheels
from mdps.runtime.errors import CalibrationError, ImageError, UsageError, require
from mdps.runtime.graphs import GUIDED
from mdps.runtime.loading import open_detector
from mdps.runtime.machine import versions
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.pipeline import Inspection
from mdps.runtime.preprocessing import Observations, Preprocessing, Views
from mdps.runtime.schedule import plan_steps
from mdps.runtime.settings import ScoreSettings, Settings
from mdps.serving.folder import predictions

Changes = Callable[[Settings], Settings]
# What the graphs of a bundle compute and no input of theirs can change (export/step.py, export/score.py).
BAKED = {
    "sampler": ("mask_rule", "guidance_norm", "gradient"),
    "score": tuple(field.name for field in fields(ScoreSettings)),
}
_USES_TEST_SET = 'the mask range is that of this very test set (mask range "dataset"): these numbers use the test set'


class BundlePredictor:
    """The detector in the folder `bundle` as an evaluation asks it; close it, or use `with`.

    `options` and `fields` are those of `load`. `changes` turns the bundle's settings into those to predict with:
    guidance scales, noise levels, steps, the mask pass, the mask's lambda and range, samples, seed and early exit are
    free. UsageError for what is part of the graphs (`BAKED`). With the mask range "dataset" the first pass runs over
    all pictures before they are judged.

    A product that was tuned is judged by its tuned detector, unless anything is changed.

    No calibration is needed. `product`'s is used where the bundle has one that was made with these settings.
    Raises as `mdps.runtime.load`, and CalibrationError where a frozen mask range was calibrated for another first pass.
    """

    def __init__(
        self,
        bundle: Path,
        options: LoadOptions | None = None,
        *,
        changes: Changes | None = None,
        batch: int = 1,
        **fields: Unpack[LoadFields],
    ) -> None:
        require(batch >= 1, f"batch {batch} should be at least 1")
        self._bundle = bundle
        options = replace(replace(options or LoadOptions(), **fields), max_batch=max(8, batch))
        self.manifest = Manifest.read(bundle)
        self._batch = 1 if self.manifest.tiles else batch
        asked = self.manifest.settings if changes is None else changes(self.manifest.settings)
        asked = options.override(asked)
        check_changes(self.manifest, asked)
        chosen = Bundle(bundle, self.manifest, asked)
        if changes is None and asked == self.manifest.settings:
            chosen = Bundle.of(bundle, self.manifest, options)
        arithmetic, product = options.arithmetic, options.product
        calibration, self._notes = _fitting(chosen, product, arithmetic)
        exit_limit(calibration, asked.sampler.early_exit, str(bundle))
        self._looked = self._left = self._again = 0
        frozen = _frozen_range(chosen, product, calibration, arithmetic)
        self.settings = _without_needless_range(chosen, frozen)
        self._uses_test_set = self.settings.mask.range == "dataset"
        if self._uses_test_set:
            self._notes = (*self._notes, _USES_TEST_SET)
        self._detector = open_detector(
            replace(chosen, settings=self.settings),
            options,
            lambda pipeline, engine: _RangedDetector(
                self.manifest, pipeline, calibration, product=product, engine=engine, tuning=chosen.tuning
            ),
        )
        self._detector.mask_range = frozen

    @property
    def name(self) -> str:
        """The bundle's."""
        return self.manifest.name

    @property
    def threshold(self) -> float | None:
        """Of the calibration, where there is one for these settings."""
        return None if self._detector.calibration is None else self._detector.calibration.threshold

    @property
    def calibration(self) -> Calibration | None:
        """The product's, where it was made with these settings."""
        return self._detector.calibration

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a reader of its numbers, as sentences; an exit's and a cascade's tell of the last `predictions`."""
        mixed, tuning = "so that ranks mix two scores", self._detector.tuning
        if tuning is not None and tuning.cascade is not None:
            again = f"{self._again} of {self._looked} images were judged again by the published method (cascade)"
            return (*self._notes, f"{again}, {mixed}")
        if not self.settings.sampler.early_exit:
            return self._notes
        return (
            *self._notes,
            f"{self._left} of {self._looked} images skipped the masked pass (early exit "
            f"{self.settings.sampler.early_exit:g}): their scores are the first pass's, {mixed}",
        )

    def covered(self, size: tuple[int, int]) -> Box:
        """The box in pixels of an upright picture of `size` (W, H) that a map shows; ImageError where there is none."""
        return self._shown().covered_box(size)

    @property
    def provenance(self) -> dict[str, object]:
        """Checkpoint and bundle with their hashes, settings, seed, versions here and at export, what computes."""
        tuning = self._detector.tuning
        seen = self._shown() if tuning is None or tuning.photograph is None else tuning.photograph
        return {
            **self._detector.provenance,
            "image_size": list(seen.network_size),
            "backbone": self.settings.score.backbone if tuning or self.settings.score.stages else None,
            "backbone_sha256": self.manifest.network.get("backbone_weights_sha256"),
            "bundle_sha256": hashlib.sha256((self._bundle / FILE_NAME).read_bytes()).hexdigest(),
            "seed": self.settings.sampler.seed,
            "export_versions": dict(self.manifest.versions),
            "versions": versions("numpy", "pillow", *wheels(), "scikit-learn"),
            "batch": self._batch,
            "uses_test_set": self._uses_test_set,
        }

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """Score and map of each picture in order; ImageError at one that cannot be judged."""
        for prediction in self.predictions(paths):
            if isinstance(prediction, str):
                raise ImageError(prediction)
            yield prediction.score, prediction.anomaly_map

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        """A prediction for each picture in order, or the sentence that says why there is none."""
        if self._uses_test_set:
            self._detector.mask_range = self._range_over(paths)
        self._looked = self._left = self._again = 0
        for found in predictions(self._detector, paths, self._batch):
            if not isinstance(found.result, str):
                self._looked, self._left = self._looked + 1, self._left + found.result.early_exit
                self._again += found.result.judged_by == "published"
            yield found.result if isinstance(found.result, str) else self._prediction(found.result)

    def watch(self, told: Callable[[Inspection], object]) -> None:
        """Call `told` with what each batch of pictures found, in order, before its predictions are yielded."""
        self._detector.watcher = told

    def close(self) -> None:
        """Free the engines."""
        self._detector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shown(self) -> Preprocessing:
        """Preprocessing as if the network saw only what the metrics are taken from."""
        chosen = self.manifest.preprocessing
        return replace(chosen, crop="input") if chosen.crop == "metrics" else chosen

    def _prediction(self, result: Result) -> Prediction:
        cut = self._cut()
        return Prediction(
            score=result.score,
            anomaly_map=result.anomaly_map[cut],
            ms=result.times["total"],
            reconstruction=None if result.posterior_sample is None else result.posterior_sample[:, *cut],
            limit=result.pixel_limit,
        )

    def _cut(self) -> tuple[slice, slice]:
        """The part of a map that metrics are taken from: the authors cut map and truth to the crop."""
        if self.manifest.tiles:
            return slice(None), slice(None)
        (height, width), (whole_height, whole_width) = self._shown().network_size, self._detector.map_size
        top, left = (whole_height - height) // 2, (whole_width - width) // 2
        return slice(top, top + height), slice(left, left + width)

    def _range_over(self, paths: Sequence[Path]) -> tuple[float, float] | None:
        """Smallest and largest value of the first pass's maps over all readable pictures."""
        from tqdm import tqdm

        lows, highs = [], []
        starts = tqdm(range(0, len(paths), self._batch), desc="mask range", disable=None, leave=False)
        for start in starts:
            observations = [*_readable(self._detector, paths[start : start + self._batch])]
            if observations:
                maps = self._detector.first_maps(Observations.joined(observations))
                lows.append(float(maps.min()))
                highs.append(float(maps.max()))
        return (min(lows), max(highs)) if lows else None


class _RangedDetector(Detector):
    """A detector with a mask range that is not its calibration's, and with somebody watching."""

    mask_range: tuple[float, float] | None = None
    watcher: Callable[[Inspection], object] | None = None

    @property
    def map_size(self) -> tuple[int, int]:
        """(H, W) of its maps."""
        return self.preprocessing.network_size

    def inspect(
        self,
        observations: Views,
        *,
        mask_range: tuple[float, float] | None = None,
        early_exit: bool = True,
    ) -> Inspection:
        chosen = self.mask_range if mask_range is None else mask_range
        found = super().inspect(observations, mask_range=chosen, early_exit=early_exit)
        if self.watcher is not None:
            self.watcher(found)
        return found


def check_changes(manifest: Manifest, settings: Settings) -> None:
    """UsageError where `settings` ask of a bundle's graphs what they do not compute."""
    for part, names in BAKED.items():
        for name in names:
            old, new = (getattr(getattr(owner, part), name) for owner in (manifest.settings, settings))
            if old != new:
                raise UsageError(
                    f"{manifest.name} computes with {part}.{name} {old!r} in its graphs, so {new!r} needs an export "
                    "of its own: export the checkpoint again with it"
                )
    guided = any(one.guidance_scale for one in settings.sampler.passes)
    require(
        not guided or GUIDED in manifest.graphs,
        f"{manifest.name} was exported without guidance: export the checkpoint again with a --guidance-scale above 0",
    )
    for one_pass in settings.sampler.passes:  # a plan that does not fit the schedule should fail before the first image
        plan_steps(manifest.schedule, settings.sampler.time_index, one_pass, settings.sampler.eta_ddim)


def _fitting(bundle: Bundle, product: str, arithmetic: str) -> tuple[Calibration | None, tuple[str, ...]]:
    """The product's calibration if its threshold holds under what is asked, and why not if it does not."""
    manifest, asked = bundle.manifest, bundle.settings
    calibration = manifest.calibrations.get(product)
    if calibration is None:
        require(
            product == "default",
            f"{manifest.name} has no calibration for the product {product!r}, "
            f"only for {', '.join(manifest.calibrations) or 'none'}: choose one of those, or calibrate it",
        )
        return None, ()
    if calibration.tuned != bundle.tuned:
        return None, (f"the threshold of {manifest.name} was calibrated for another detector",)
    if calibration.scope != manifest.scope(product).name:
        return None, (f"the threshold of {manifest.name} was calibrated with other places to inspect",)
    if calibration.aligned != manifest.aligned(product):
        return None, (f"the threshold of {manifest.name} was calibrated with parts that lay otherwise",)
    own = bundle.tuning is not None or _unseeded(asked) == _unseeded(manifest.settings)
    if calibration.samples != asked.sampler.samples or not own:
        return None, (f"the threshold of {manifest.name} was calibrated with other settings",)
    if calibration.arithmetic != arithmetic:
        return None, (f"the threshold of {manifest.name} was calibrated in other arithmetic",)
    return calibration, (calibration.doubt,) if calibration.doubt else ()


def _unseeded(settings: Settings) -> Settings:
    """Without what a calibration may differ in or names itself."""
    return replace(settings, sampler=replace(settings.sampler, seed=0, samples=1, early_exit=0.0))


def _frozen_range(
    bundle: Bundle, product: str, fitting: Calibration | None, arithmetic: str
) -> tuple[float, float] | None:
    """The calibrated mask range, where the settings take a frozen one and there is one."""
    manifest, asked = bundle.manifest, bundle.settings
    if bundle.tuning is not None:
        return fitting.mask_range if fitting and asked.mask.range == "frozen" else None
    calibration = manifest.calibrations.get(product)
    if asked.mask.range != "frozen" or asked.sampler.masked_pass is None or calibration is None:
        return None
    first = replace(_unseeded(asked).sampler, masked_pass=None)
    same = first == replace(_unseeded(manifest.settings).sampler, masked_pass=None)
    own = (calibration.tuned, calibration.samples, calibration.arithmetic) == ("", asked.sampler.samples, arithmetic)
    if not (same and own):
        raise CalibrationError(
            f"the frozen mask range of {manifest.name} was calibrated with another first pass: keep the first pass, "
            'the samples and the arithmetic, or choose the mask range "per-image"'
        )
    return calibration.mask_range


def _without_needless_range(bundle: Bundle, frozen: tuple[float, float] | None) -> Settings:
    """A range that no pass runs under is not asked for: without a masked pass the mask changes no score."""
    asked = bundle.settings
    if bundle.tuning is not None or asked.sampler.masked_pass is not None or frozen is not None:
        return asked
    return replace(asked, mask=replace(asked.mask, range="per-image"))


def _readable(detector: Detector, paths: Sequence[Path]) -> Iterator[Observations]:
    for path in paths:
        try:
            yield detector.observe([path])
        except ImageError:  # it is named when its turn comes to be judged
            continue
