"""The whole benchmark: who takes part, the interleaved rounds, and what is left of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from mdps.benchmarks.bench import SkippedError, Spec, missing
from mdps.benchmarks.bench.local import forward_flop
from mdps.benchmarks.bench.report import Bench, Cost, Row, Yardstick, baseline, matrix_rate
from mdps.benchmarks.bench.rounds import Measurement, measure
from mdps.benchmarks.kit import Say, measured_with, quiet
from mdps.runtime.cards import cards, find
from mdps.runtime.engines import DEFAULT, ENGINES
from mdps.runtime.errors import MdpsError, UsageError, require
from mdps.runtime.machine import available_cpus
from mdps.runtime.manifest import FileEntry, Manifest
from mdps.runtime.option import Option, check_ranges

WAYS = {
    "authors": "torch, as the authors wrote it",
    "eager": "torch, one forward a step",
    "compile": "torch.compile, one forward a step",
}
METHOD_NAMES = {"anoddpm": "AnoDDPM", "autoddpm": "AutoDDPM"}
TIMED = [engine for engine in ENGINES if engine.reads in ("onnx", "own")]
PLANNED = [engine.name for engine in ENGINES if engine.reads == "plans"]
PEER_NAMES = {"patchcore": "PatchCore", "draem": "DRAEM", "padim": "PaDiM", "efficientad": "EfficientAD"}


@dataclass(frozen=True)
class BenchOptions:
    """Who takes part and how long. `batches` and `samples` are swept on our engines, 1 apart, which all measure."""

    ckpt: Annotated[Path | None, Option("The bundle's checkpoint, for torch [default: beside the bundle].")] = None
    engines: Annotated[
        tuple[str, ...] | None,
        Option("Of ours, or none [default: those of --device that need no plans].", example="onnxruntime,mnn"),
    ] = None
    ways: Annotated[
        tuple[str, ...],
        Option("Ways of running the checkpoint in torch, or none.", flag="--torch", example="authors,eager"),
    ] = tuple(WAYS)
    methods: Annotated[
        tuple[str, ...],
        Option("Other detectors on our runtime, exported from the checkpoint; or none.", example="anoddpm,autoddpm"),
    ] = tuple(METHOD_NAMES)
    peers: Annotated[
        tuple[str, ...],
        Option(f"Detectors of anomalib: {', '.join(PEER_NAMES)}; or none.", example="patchcore,draem"),
    ] = ("patchcore", "draem")
    batches: Annotated[tuple[int, ...], Option("Batches to measure besides 1, or none.", low=1, example="2,4,8")] = (4,)
    samples: Annotated[tuple[int, ...], Option("N_s to measure besides 1, or none.", low=1, example="2,4,8")] = (4,)
    sizes: Annotated[
        tuple[int, ...],
        Option(
            "Sides of images to measure as well, such as 64,96,128, exported from the checkpoint.",
            low=1,
            example="64,96,128",
        ),
    ] = ()
    one_file: Annotated[
        bool,
        Option("Also the calibrated bundle as one ONNX file, in plain ONNX Runtime.", flag="--single-file"),
    ] = False
    rounds: Annotated[int, Option("Times each one runs.", low=1)] = 5
    threads: int | None = None
    device: Annotated[
        str, Option("Where all run: cpu, cuda, or a card's index as nvidia-smi shows it, or its UUID.")
    ] = "cpu"
    warm_up: Annotated[int, Option("Runs before those that count, after the first.", low=0, seldom=True)] = 1
    bank_images: Annotated[int, Option("Made-up images that make the peers' memory.", low=1, seldom=True)] = 200
    backbone_weights: Annotated[
        Path | None, Option("Of the feature network, for torch, as at the export.", seldom=True)
    ] = None
    matrix_side: Annotated[int, Option("Of the product that measures the machine's rate.", low=16, seldom=True)] = 2048
    patience: Annotated[
        float,
        Option("Seconds after which a competitor that answers nothing is given up.", low=0, above=True, seldom=True),
    ] = 1800.0

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("engine", self.engines or (), [engine.name for engine in TIMED]), ("torch way", self.ways, WAYS),
            ("method", self.methods, METHOD_NAMES), ("peer", self.peers, PEER_NAMES),
        ):  # fmt: skip
            for name in given:
                plans = " (`mdps gpu-check` measures engine plans)" if name in PLANNED else ""
                require(name in known, f"there is no {kind} {name!r}: choose among {', '.join(known)}{plans}")
        check_ranges(self)
        weights = self.backbone_weights
        require(weights is None or weights.exists(), f"there is no {weights}: check the path")

    @property
    def ours(self) -> tuple[str, ...]:
        """The engines asked for, or all of where it runs that need no plans."""
        on_card = self.device != "cpu"
        return tuple(one.name for one in TIMED if one.on_card == on_card) if self.engines is None else self.engines


class Variations:
    """Kept in `folder`. Imports torch when the first one is asked for."""

    def __init__(self, manifest: Manifest, ckpt: Path | None, weights: Path | None, folder: Path, say: Say) -> None:
        self._manifest, self._ckpt, self._weights, self._folder, self._say = manifest, ckpt, weights, folder, say
        self._made: dict[str | int | Path, Path | SkippedError] = {}

    def get(self, what: str | int | Path) -> Path:
        """Return a bundle, of a method by its name or at a side of the image, or a calibrated bundle as one ONNX file.

        SkippedError says why there is none.
        """
        if what not in self._made:
            self._made[what] = self._make(what)
        found = self._made[what]
        if isinstance(found, SkippedError):
            raise found
        return found

    def _make(self, what: str | int | Path) -> Path | SkippedError:
        try:
            from mdps.benchmarks.bench.reexport import Reexporter

            reexporter = Reexporter(self._manifest, self._ckpt, self._weights, self._folder, self._say)
            if isinstance(what, Path):
                return reexporter.one_file(what)
            return reexporter.method(what) if isinstance(what, str) else reexporter.size(what)
        except MdpsError as error:
            return SkippedError(str(error))
        except ModuleNotFoundError as error:
            return SkippedError(missing(error, "torch"))


def run_bench(bundle: Path, options: BenchOptions, say: Say = quiet) -> Bench:
    """Measures everything; a competitor that cannot run is a row with the reason. UsageError, BundleError."""
    manifest = Manifest.read(bundle)
    ckpt = find_checkpoint(bundle, manifest, options.ckpt)
    with TemporaryDirectory(prefix="mdps-bench-") as folder:
        variations = Variations(manifest, ckpt, options.backbone_weights, Path(folder), say)
        return _run(bundle, manifest, options, ckpt, variations, say)


def _run(
    bundle: Path, manifest: Manifest, options: BenchOptions, ckpt: Path | None, variations: Variations, say: Say
) -> Bench:
    rate, *specs = _specs(bundle, options, ckpt)
    exported, absent = _exported(rate, options, variations)
    machine = measured_with(manifest)
    first, *others = _measure([rate, *specs, *exported], options, say)
    ours, samples = baseline(others), manifest.settings.sampler.samples
    yardstick = Yardstick(
        cost=Cost.of(manifest, first.facts.get("forward_flop")),
        samples=samples,
        image_ms=median(ours.ms) if ours else None,
        score=ours.facts["score"] if ours else None,
        matrix_rate=matrix_rate(first),
        image_size=manifest.preprocessing.network_size,
    )
    rows = [_row(one, yardstick, bundle) for one in [*others, *absent]]
    ran = [one for one in others if one.spec.kind == "ours" and one.ms]
    rows += _sweep(ran, yardstick, options, say) + _sizes(ran, yardstick, options, variations, say)
    return Bench(rows, machine | _measured(first, yardstick, ours, options))


def _exported(common: Spec, options: BenchOptions, variations: Variations) -> tuple[list[Spec], list[Measurement]]:
    """The one file and the methods that could be exported, and those that could not with the reason."""
    ready, absent = [], []
    engine = next(iter(options.ours), DEFAULT)
    wanted: list[tuple[Spec, str, str | Path]] = []
    if options.one_file:
        wanted.append((replace(common, name="mdps, one file", kind="file"), "variant", Path(common.bundle)))
    for name in options.methods:
        spec = replace(common, name=f"{METHOD_NAMES[name]}, our runtime", kind="method", variant=engine)
        wanted.append((spec, "bundle", name))
    for spec, place, what in wanted:
        try:
            made: dict[str, Any] = {place: str(variations.get(what))}
            ready.append(replace(spec, **made))
        except SkippedError as reason:
            absent.append(Measurement(spec, skipped=str(reason)))
    return ready, absent


def _row(one: Measurement, yardstick: Yardstick, bundle: Path, single: Measurement | None = None) -> Row:
    """A row; of a bundle made for this run with its own steps, size and FLOPs."""
    if one.spec.bundle == str(bundle):
        return yardstick.row(one, single)
    manifest = Manifest.read(one.spec.bundle, verify=False)  # written a moment ago
    return yardstick.of(manifest, forward_flop(manifest)).row(one, single)


def where(device: str) -> tuple[str, str | None]:
    """Where torch computes, and the UUID of the card where `device` names one; as `find`."""
    if device in ("cpu", "cuda"):
        return device, None
    return "cuda", find(device, cards()).uuid


def find_checkpoint(bundle: Path, manifest: Manifest, given: Path | None) -> Path | None:
    """The checkpoint given, or the one the bundle was made from where it lies beside the bundle under its name."""
    if given is not None:
        require(given.exists(), f"there is no checkpoint {given}: check --ckpt")
        if given.is_file() and FileEntry.of(given).sha256 != manifest.checkpoint.sha256:
            raise UsageError(
                f"{given} is not the checkpoint that {bundle} was made from ({manifest.checkpoint.name}): give that one"
            )
        return given
    beside = bundle.resolve().parent / manifest.checkpoint.name
    same = beside.is_file() and FileEntry.of(beside).sha256 == manifest.checkpoint.sha256
    return beside if same or beside.is_dir() else None


def _specs(bundle: Path, options: BenchOptions, ckpt: Path | None) -> list[Spec]:
    """The matrix product, then every competitor at one image and the bundle's samples."""
    device, card = where(options.device)
    common = Spec(
        name="fp32 matrix product",
        kind="rate",
        variant="",
        bundle=str(bundle),
        threads=options.threads or available_cpus(),
        device=device,
        card=card,
        ckpt=str(ckpt) if ckpt else None,
        backbone_weights=str(options.backbone_weights) if options.backbone_weights else None,
        bank_images=options.bank_images,
        matrix_side=options.matrix_side,
    )
    ours = [replace(common, name=f"mdps, {name}", kind="ours", variant=name) for name in options.ours]
    ways = [replace(common, name=WAYS[way], kind="torch", variant=way) for way in options.ways]
    peers = [replace(common, name=PEER_NAMES[peer], kind="peer", variant=peer) for peer in options.peers]
    return [common, *ours, *ways, *peers]


def _measure(specs: Sequence[Spec], options: BenchOptions, say: Say) -> list[Measurement]:
    return measure(specs, rounds=options.rounds, warm_up=options.warm_up, patience=options.patience, say=say)


def _sweep(ran: Sequence[Measurement], yardstick: Yardstick, options: BenchOptions, say: Say) -> list[Row]:
    """Each point in rounds of its own with the same engine's single image: at most two processes hold memory."""
    rows = []
    for one in ran:
        name, batches, samples = one.spec.name, options.batches, options.samples
        points = [replace(one.spec, name=f"{name}, batch {count}", batch=count) for count in batches if count > 1]
        points += [replace(one.spec, name=f"{name}, N_s = {count}", samples=count) for count in samples if count > 1]
        for point in points:
            alone = replace(one.spec, samples=1 if point.samples else None)
            single, many = _measure([alone, point], options, say)
            rows.append(yardstick.row(many, single))
    return rows


def _sizes(
    ran: Sequence[Measurement], yardstick: Yardstick, options: BenchOptions, variations: Variations, say: Say
) -> list[Row]:
    """One image at other sizes, each in rounds of its own with the bundle's own size."""
    rows = []
    for one in ran:
        for side in options.sizes:
            point = replace(one.spec, name=f"{one.spec.name}, {side} x {side}")
            try:
                point = replace(point, bundle=str(variations.get(side)))
            except SkippedError as reason:
                rows.append(yardstick.row(Measurement(point, skipped=str(reason))))
                continue
            single, other = _measure([one.spec, point], options, say)
            rows.append(_row(other, yardstick, Path(one.spec.bundle), single))
    return rows


def _measured(
    rate: Measurement, yardstick: Yardstick, ours: Measurement | None, options: BenchOptions
) -> dict[str, Any]:
    return {
        "threads": rate.spec.threads,
        "device": rate.facts.get("device_name", options.device),
        "matrix_gflops_per_s": yardstick.matrix_rate,
        "matrix_library": rate.facts.get("matrix_library"),
        "forward_gflop": _giga(rate.facts.get("forward_flop")),
        "image_gflop": _giga(yardstick.cost.flop),
        "steps": yardstick.cost.steps,
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "baseline": ours.spec.name if ours else None,
    }


def _giga(flop: int | None) -> float | None:
    return None if flop is None else flop / 1e9
