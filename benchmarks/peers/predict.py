"""Fitted detectors of anomalib that score pictures, kept on disk under what determines them, and compared."""

import hashlib
import importlib.util
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.data.samples import Box, Category
from mdps.benchmarks.evaluate import evaluate_in_turn
from mdps.benchmarks.evaluate.predictions import Judge, Prediction
from mdps.benchmarks.evaluate.report import ERRORS, error_cells, input_cell, metric_cells
from mdps.benchmarks.evaluate.results import METRICS, Evaluation
from mdps.benchmarks.kit import Say, table, write_report
from mdps.benchmarks.options import PeerOptions
from mdps.benchmarks.peers import PEERS, PeerSkippedError, settings_of
from mdps.runtime.atomic import new_folder, write_text
from mdps.runtime.calibration import good_threshold, too_few
from mdps.runtime.errors import ImageError, UsageError, require
from mdps.runtime.machine import available_cpus, versions
from mdps.runtime.manifest import FileEntry
from mdps.runtime.preprocessing import Preprocessing, read_image

APART = 5
"""Every fifth good training image is held apart from the fits, the same for all, and gives the threshold."""
SCORES = "good_scores.json"


class Split(Protocol):
    """The part of a `Category` that is read."""

    @property
    def name(self) -> str: ...
    @property
    def train(self) -> tuple[Path, ...]: ...
    @property
    def validation(self) -> tuple[Path, ...]: ...


@dataclass(frozen=True)
class Divided:
    """A split whose training images are those to fit to; `apart` are the others."""

    name: str
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    apart: tuple[Path, ...]


def divided(split: Split, options: PeerOptions) -> Divided:
    """Hold apart what a threshold needs, if one is asked for."""
    apart = split.train[APART - 1 :: APART] if options.false_alarm_rate is not None else ()
    train = tuple(path for path in split.train if path not in set(apart))
    return Divided(split.name, train, split.validation, apart)


class PeerPredictor:
    """Scores pictures with anomalib's un-normalised `pred_score` and `anomaly_map`, one at a time.

    Maps are float32 [h, w] in the size the pictures were resized to. There is a `threshold` after `calibrate`.
    """

    threshold: float | None = None

    def __init__(self, name: str, module: Any, options: PeerOptions, provenance: Mapping[str, Any]) -> None:
        self.name = PEERS[name].title
        self.provenance = provenance
        self._too_few = ""
        self._module = module.eval().to(options.device)
        self._device = options.device
        self._read = Preprocessing(options.size)

    @property
    def notes(self) -> tuple[str, ...]:
        """That the fit was shorter than the published one, and the good images too few for the rate, where it is so."""
        steps, published = self.provenance.get("steps", 0), self.provenance.get("published_steps", 0)
        short = f"{self.name} was fitted for {steps:,} of its {published:,} published steps: it can do better"
        return tuple(filter(None, (short if steps < published else "", self._too_few)))

    def calibrate(self, scores: Sequence[float], rate: float) -> None:
        """Take the threshold that `mdps calibrate` would take from these scores of good images."""
        self.threshold, promised = good_threshold(np.array(scores, np.float32), rate)
        self._too_few = too_few(len(scores), rate, promised)
        made = {"threshold": self.threshold, "images": len(scores), "false_alarm_rate": rate}
        self.provenance = {**self.provenance, "calibration": made | {"expected_false_alarm_rate": promised}}

    def covered(self, size: tuple[int, int]) -> Box:
        """All of a picture of `size` (W, H)."""
        return (0.0, 0.0, float(size[0]), float(size[1]))

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """(anomaly score, map [h, w]) of each picture in order; ImageError naming a file that cannot be read."""
        for path in paths:
            prediction = self._prediction(path)
            yield prediction.score, prediction.anomaly_map

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        """The same with the time from the decoded picture to the map; a sentence for a file that cannot be read."""
        for path in paths:
            try:
                yield self._prediction(path)
            except ImageError as error:
                yield str(error)

    def _prediction(self, path: Path) -> Prediction:
        import torch

        picture = read_image(path)
        start = time.perf_counter()
        image = torch.from_numpy((self._read(picture) + 1) / 2)[None].to(self._device)
        with torch.inference_mode():
            found = self._module(image)
        anomaly_map: NDArray[np.float32] = found.anomaly_map.float().cpu().numpy()
        score = float(found.pred_score.reshape(()))
        ms = (time.perf_counter() - start) * 1000
        return Prediction(score, anomaly_map.reshape(anomaly_map.shape[-2:]), ms)


def peer_predictor(name: str, category: Split, *, work: Path, **options: Any) -> PeerPredictor:
    """The detector `name` of PEERS, fitted and calibrated, or read back from `work` where that was done before.

    It is fitted to `category.train` less what its threshold is taken from. `options` are the fields of `PeerOptions`.
    Raises UsageError for an unknown name or where anomalib is missing, PeerSkippedError where the detector needs
    something that is not on this machine, ImageError for a good image that cannot be read.
    """
    require(name in PEERS, f"there is no peer {name!r}: choose among {', '.join(PEERS)}")
    if importlib.util.find_spec("anomalib") is None:
        raise UsageError("the peers run in anomalib, which is not installed: pip install 'mdps[peers]'")
    chosen = _settled(PeerOptions(**options))
    split = divided(category, chosen)
    chosen = with_share(chosen, len(split.train))
    identity = _identity(name, split, chosen)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    folder = work / f"{name}-{key}"
    if not (folder / "fitted.json").is_file():
        _fit(name, split, chosen, identity, folder)
    predictor = _open(name, chosen, folder)
    if chosen.false_alarm_rate is not None and split.apart:
        predictor.calibrate(_good_scores(predictor, split.apart, folder / SCORES), chosen.false_alarm_rate)
    return predictor


def _good_scores(predictor: PeerPredictor, images: Sequence[Path], path: Path) -> list[float]:
    """Return the scores of the images, which are part of the folder's key; as they are in `path` if they are there."""
    if not path.is_file():
        write_text(path, json.dumps([score for score, _ in predictor(images)]))
    scores: list[float] = json.loads(path.read_text(encoding="utf-8"))
    return scores


def with_share(options: PeerOptions, images: int) -> PeerOptions:
    """With the share of the patches of `images` images that `patches` are, if these are given; all where it is more."""
    if options.patches is None:
        return options
    stride = 2 ** (PEERS["patchcore"].stages[0] + 1)
    count = images * math.prod(math.ceil(side / stride) for side in options.size)
    # anomalib rounds the number down
    return replace(options, patches=None, coreset=min(1.0, (options.patches + 0.5) / max(count, 1)))


def _settled(options: PeerOptions) -> PeerOptions:
    """With a device in place of `auto`, torch held to the threads; UsageError where the machine has no such device."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available()
    if options.device.startswith("cuda") and not cuda:
        raise UsageError(f"--device {options.device} was asked for, and torch sees no GPU here: use cpu or auto")
    return replace(options, device="cuda" if cuda else "cpu") if options.device == "auto" else options


def _identity(name: str, category: Divided, options: PeerOptions) -> dict[str, Any]:
    """All that a fit depends on. PeerSkippedError as from `settings_of`."""
    files = [path for path in (options.backbone_weights, options.teacher) if path is not None and path.is_file()]
    recipe = PEERS[name]
    return {
        "peer": name,
        "category": category.name,
        "train_sha256": _digest(category.train),
        "validation_sha256": _digest(category.validation),
        "apart_sha256": _digest(category.apart),
        "image_size": list(options.size),
        "backbone": options.backbone if recipe.stages else None,
        "files": [FileEntry.of(path).sha256 for path in files],
        "settings": settings_of(name, options),
        "budget_minutes": options.minutes if recipe.iterative else None,
        "budget_steps": options.steps if recipe.iterative else None,
        "textures": str(options.textures) if name == "draem" else None,
        "seed": options.seed,
        "device": options.device.partition(":")[0],
        "anomalib": version("anomalib"),
    }


def _digest(paths: Sequence[Path]) -> str:
    """Of the files' bytes in their order."""
    return hashlib.sha256("".join(FileEntry.of(path).sha256 for path in paths).encode()).hexdigest()


def _fit(name: str, category: Split, options: PeerOptions, identity: Mapping[str, Any], folder: Path) -> None:
    import torch

    from mdps.benchmarks.peers.fitting import build, fit, quiet

    require(bool(category.train), f"{category.name} has no training images: {name} cannot be fitted")
    scratch = folder.with_name(f"{folder.name}.unfinished")
    scratch.mkdir(parents=True, exist_ok=True)
    with quiet():
        module, facts = build(name, options, scratch)
        facts |= fit(name, module, category.train, category.validation, options, scratch)
    with new_folder(folder, replace=True) as new:
        torch.save(module.state_dict(), new / "fitted.pt")
        facts["fitted_sha256"] = FileEntry.of(new / "fitted.pt").sha256
        facts["versions"] = versions("anomalib", "lightning", "torch", "timm")
        write_text(new / "fitted.json", json.dumps({**identity, **facts}, indent=1) + "\n")
    shutil.rmtree(scratch)


def _open(name: str, options: PeerOptions, folder: Path) -> PeerPredictor:
    import torch

    from mdps.benchmarks.peers.fitting import build, quiet

    with quiet(), tempfile.TemporaryDirectory() as scratch:
        module, _ = build(name, options, Path(scratch))
    module.load_state_dict(torch.load(folder / "fitted.pt", map_location="cpu", weights_only=True))
    return PeerPredictor(name, module, options, json.loads((folder / "fitted.json").read_text(encoding="utf-8")))


FITTED = "fitted"

Row = dict[str, Any]
"""`judge`, `category`, and what `Evaluation.to_json` gives, or `skipped` with the reason."""


def compare(
    names: Sequence[str],
    categories: Sequence[Category],
    out: Path,
    *,
    beside: Sequence[Judge] = (),
    every: int = 1,
    largest: int | None = 256,
    say: Say = print,
    **options: Any,
) -> list[Row]:
    """Fit each of `names` to each category, and evaluate them and those `beside` in turn on the same images.

    `options` are the fields of `PeerOptions`; those beside should have as many threads as they say.

    Leaves in `out`: peers.json and peers.md (kept up to date after every category), a folder NAME/CATEGORY with what
    `mdps evaluate` writes, and fitted/, from which an interrupted comparison goes on. Raises as `peer_predictor`, but
    for PeerSkippedError, which becomes a row.
    """
    unknown = [name for name in names if name not in PEERS]
    require(not unknown, f"there is no peer {', '.join(unknown)}: choose among {', '.join(PEERS)}")
    require(bool(names), f"no peer is named: choose among {', '.join(PEERS)}")
    options["threads"] = options.get("threads") or available_cpus()
    rows: list[Row] = []
    for category in categories:
        judges, skipped = _fitted(names, category, out, say, options)
        judges = [(one, out / kind_of(one.provenance) / category.name) for one in beside] + judges
        found = evaluate_in_turn(judges, category, largest=largest, every=every) if judges else []
        rows += [{**row, "threads": options["threads"]} for row in timed(found)] + skipped
        write_report(out, "peers", rows, markdown(rows))
    return rows


def kind_of(provenance: Mapping[str, Any]) -> str:
    """Return which of a bundle's detectors judged, "" for a peer."""
    if "tuned" not in provenance:
        return ""
    return "tuned" if provenance["tuned"] else "published"


def _fitted(
    names: Sequence[str], category: Category, out: Path, say: Say, options: Mapping[str, Any]
) -> tuple[list[tuple[Judge, Path]], list[Row]]:
    """Return the detectors, each with the folder for its results, and the rows of those that cannot run here."""
    judges: list[tuple[Judge, Path]] = []
    skipped: list[Row] = []
    for name in names:
        say(f"{category.name}: {PEERS[name].title}")
        try:
            peer = peer_predictor(name, category, work=out / FITTED, **options)
        except PeerSkippedError as error:
            say(f"{category.name}: {PEERS[name].title}: {error}")
            skipped.append({"judge": PEERS[name].title, "category": category.name, "skipped": str(error)})
        else:
            judges.append((peer, out / name / category.name))
    return judges, skipped


def timed(found: Sequence[Evaluation]) -> list[Row]:
    """Return a row for each, with quartiles of its times, and their medians as multiples of PatchCore's."""
    rows = [{"judge": _judge(one), **one.to_json(), **_quartiles(one)} for one in found]
    for base in [row for row in rows if row["judge"] == PEERS["patchcore"].title]:
        for row in rows:
            row |= {f"{name}_to_patchcore": row[name][1] / base[name][1] for name in TIMES}
    return rows


def _judge(found: Evaluation) -> str:
    return ", ".join(filter(None, (found.predictor, kind_of(found.provenance))))


TIMES = ("ms", "processor_ms")
"""Of a `ScoredImage`; a row has their quartiles."""


def _quartiles(found: Evaluation) -> dict[str, list[float]]:
    judged = [row for row in found.rows if row.error is None]
    return {name: np.quantile([getattr(row, name) for row in judged], (0.25, 0.5, 0.75)).tolist() for name in TIMES}


def markdown(rows: Sequence[Row]) -> str:
    """A table of the metrics, the verdicts' errors, the times side by side, how each was made, and who was skipped."""
    judged = [_cells(row) for row in rows if "skipped" not in row]
    times = ("ms quartiles", "x PatchCore", "processor ms", "x PatchCore", "threads")
    heads = ["judge", "input", "category", "images", *METRICS, *times, *ERRORS, "calibrated on", "fitted"]
    shown = table(heads, judged, left=(0, 1, 2, -1))
    return "\n\n".join([shown, *_notes(rows)]) + "\n"


def _cells(row: Row) -> list[str]:
    made, (first, _, third) = row["provenance"], row["ms"]
    ratios = [f"{row[key]:.2f}" if (key := f"{name}_to_patchcore") in row else "" for name in TIMES]
    times = [f"{first:.1f} to {third:.1f}", ratios[0], f"{row['processor_ms'][1]:.1f}", ratios[1], str(row["threads"])]
    numbers = [str(row["images"]), *metric_cells(row), *times, *error_cells(row["verdicts"])]
    return [row["judge"], input_cell(made), row["category"], *numbers, _calibrated(made), fitted(made)]


def _calibrated(provenance: Mapping[str, Any]) -> str:
    """Return how many good images gave the threshold, and for which rate of false alarms; nothing without one."""
    found = provenance.get("calibration")
    return f"{found['images']} for {found['false_alarm_rate']:g}" if found else ""


def fitted(provenance: Mapping[str, Any]) -> str:
    """How long a detector was fitted, for people; nothing for a bundle."""
    if "train_images" not in provenance:
        return ""
    text = f"{provenance['train_images']} images, {provenance['fit_seconds']:.0f} s"
    bank = f", {provenance['patches']:,} patches" if "patches" in provenance else ""
    return f"{text}, {provenance['steps']} steps" if "steps" in provenance else f"{text}, one pass{bank}"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"Skipped {row['judge']} on {row['category']}: {row['skipped']}" for row in rows if "skipped" in row)
    yield from (
        f"{row['judge']} on {row['category']}: {problem}" for row in rows for problem in row.get("problems", ())
    )
