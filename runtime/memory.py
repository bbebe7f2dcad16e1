"""Memory of a bundle, a training or an export, and whether the processor has room for it: asked before it starts.

On the processor it is modelled from the manifest, by parts: libraries, weights, what lives at once in a step (recorded
by the export, node by node), and the arrays of a pass. The numbers in `_FITTED` were fitted to the peaks of fresh
processes; docs/use/running.md has the comparison, tests/runtime/test_cpu_memory.py repeats it. On a card it is
estimated from the files and the network's levels: between 1 and 2.2 times of what the real step graphs need.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.engines import AUTO, DEFAULT, named
from mdps.runtime.errors import UsageError
from mdps.runtime.graphs import GUIDED, STEPS
from mdps.runtime.machine import Room, rooms
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import KEPT_BYTES
from mdps.runtime.schedule import plan_steps
from mdps.runtime.settings import Settings
from mdps.runtime.tuning import Tuning

_FLOAT = 4
_MB = 10**6
_PASS_ARRAYS = 9  # of the size of all samples: y, noise, none, x in two, mask, what is drawn, the samples before
_TRAINED = 1.65  # of a guided step's estimate: what torch keeps for the way back, and what that leaves
_TRAINING_COPIES, _TRAINING = 7, 230 * _MB  # weights, gradients, moments, average, a checkpoint; and what torch starts
_EXPORT_COPIES, _EXPORTING, _GATE_STEPS = 8, 840 * _MB, 16
_MAPPED = 500 * _MB  # threads' stacks and pools
BIG_BATCH = 256 * _MB
# On a card CUDA's context, the handles and workspaces of cuDNN and cuBLAS: a round number that no estimate gives.
CARD_LIBRARIES = 600 * _MB
_GUIDED_MAPS, _PLAIN_MAPS = 13, 8  # maps of a level's width and size that live at once: a block, and a level
_CHANNELS = 100 * _FLOAT  # bytes a pixel of what scores
_HALF = 0.75  # of the activations in half precision: norms and what lies beside a cast stay float32


@dataclass(frozen=True)
class Need:
    """Bytes by part; `mapped` are addresses that are taken beyond them and never used."""

    parts: Mapping[str, int]
    mapped: int = 0

    @property
    def total(self) -> int:
        """All that becomes resident."""
        return sum(self.parts.values())

    def of(self, room: Room) -> int:
        """Return how much of a room it takes."""
        return self.total + self.mapped if room.mapped else self.total

    def details(self, *, mapped: bool = False) -> str:
        """Name the parts that count, in gigabytes."""
        parts = {name: size for name, size in self.parts.items() if size >= _MB / 2}
        if mapped:
            parts |= {"addresses that are reserved and not used": self.mapped}
        return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


@dataclass(frozen=True)
class _Fitted:
    """The fitted memory of an engine: `library` once, then multiples of a graph's file, its weights, what lives in it.

    `shifted` is `lives` for networks with scale-shift norms, whose buffers fit less well into the memory of others.
    """

    module: str
    library: int
    graph: float
    weights: float
    lives: float
    shifted: float
    mapped: int
    mapped_graph: float = 0.0
    mapped_lives: float = 0.0


_WIDE, _WINOGRAD = 64, 5.5  # from so many channels on MNN transforms most 3 x 3 weights, which become as much larger
_SCORED = 2.2  # of what lives in features and score on ONNX Runtime, which has the score's for MNN too
_ORT = _Fitted("onnxruntime", 29 * _MB, 80, 1.0, 1.45, 1.75, 100 * _MB, mapped_lives=1.5)
_FITTED = {
    "onnxruntime": _ORT,
    "openvino": _Fitted("openvino", 99 * _MB, 635, 1.63, 1.0, 1.0, 670 * _MB, mapped_graph=950, mapped_lives=1.0),
    "mnn": _Fitted("MNN", 39 * _MB, 0, 1.17, 1.41, 1.41, 300 * _MB),
    "torch": _Fitted("torch", 490 * _MB, 0, 1.5, 1.45, 1.45, 2700 * _MB),
}
LIBRARIES = {
    "torch": Need({"torch": 500 * _MB}, 2700 * _MB),
    "export": Need({"torch, timm and onnx": 710 * _MB}, 2900 * _MB),
    "train": Need({"torch": 520 * _MB}, 2720 * _MB),
}
"""Memory that importing takes, as measured: resident, and mapped addresses."""


def estimate(manifest: Manifest, roles: Iterable[str], samples: int, files: Mapping[str, str] | None = None) -> Need:
    """Estimate what the graphs `roles` take of a card for `samples` at once: an engine keeps its weights once a graph.

    `files` names files in the place of graphs: an engine plan, which holds its weights itself.
    """
    given, roles = files or {}, tuple(roles)
    plans = sum(manifest.files[given[role]].bytes for role in roles if role in given)
    graphs = [_files(manifest, role, _engine(manifest, role, DEFAULT)) for role in roles if role not in given]
    weights = plans + sum(graph + weights for _, graph, weights in graphs)
    shares = [_step(manifest, role) for role in roles if role in STEPS]
    if len(shares) < len(roles):
        shares.append(_scoring(manifest))
    return Need({"weights": weights, "activations": samples * sum(shares), "libraries": CARD_LIBRARIES})


def live(manifest: Manifest, role: str, file: str) -> int:
    """Return the bytes of one sample that live at once in the graph `role`: what its export recorded for `file`.

    Of an older bundle it is the estimate.
    """
    recorded = manifest.network.get("live_bytes")
    found = recorded.get(file) if isinstance(recorded, dict) else None
    if isinstance(found, int) and found > 0:
        return found
    try:
        return _step(manifest, role) if role in STEPS else _scoring(manifest)
    except (TypeError, ValueError, LookupError):  # `network` is free of form, so it may not describe a network
        return _scoring(manifest)


def _scoring(manifest: Manifest) -> int:
    """Return an upper bound for features and score: one image with a hundred channels."""
    height, width = manifest.preprocessing.network_size
    return _CHANNELS * max(height * width, (manifest.settings.score.feature_size or 0) ** 2)


def _step(manifest: Manifest, role: str) -> int:
    network = {"model_channels": 64, "channel_mult": [1, 2, 4], "num_res_blocks": 2} | manifest.network
    floats = step_bytes(network, manifest.preprocessing.network_size, guided=role == GUIDED)
    return round(floats * (_HALF if manifest.precision != "fp32" else 1))


def weight_bytes(network: Mapping[str, Any]) -> int:
    """Return about how many bytes the weights of a network take in float32, from its configuration."""
    blocks: int = network["num_res_blocks"]
    squares = sum((mult * network["model_channels"]) ** 2 for mult in network["channel_mult"])
    # 3 x 3 convolutions: two a block on the way down, on the way up the first has the skip beside it; two resamplers.
    return int(1.2 * _FLOAT * squares * (18 * blocks + 29 * (blocks + 1) + 36))


def step_bytes(network: Mapping[str, Any], size: tuple[int, int], *, guided: bool) -> int:
    """Return the bytes of a sample in float32 that live at once in a step at `size` (H, W), from its configuration."""
    height, width = size
    blocks: int = 2 * network["num_res_blocks"] + 1  # of a level, down and up
    pixels = [height * width / 4**level for level in range(len(network["channel_mult"]))]
    maps = sum(
        mult * network["model_channels"] * count for mult, count in zip(network["channel_mult"], pixels, strict=True)
    )
    heads = network.get("num_heads") or 1
    attention = [heads * (height * width / factor**2) ** 2 for factor in network.get("attention_factors", ())]
    floats: float
    if guided:  # what the gradient goes back through is kept
        floats = _GUIDED_MAPS * blocks * maps + 2 * blocks * sum(attention)
    else:
        floats = _PLAIN_MAPS * maps + 2 * max(attention, default=0)
    return round(_FLOAT * floats)


def check_room(need: Need, what: str, lower: str) -> None:
    """Raise UsageError where `what` needs more than there is, with both figures and what to `lower`."""
    short = [room for room in rooms() if need.of(room) > room.bytes]
    if not short:
        return
    tightest = min(short, key=lambda room: room.bytes - need.of(room))
    details = need.details(mapped=tightest.mapped)
    raise UsageError(
        f"{what} needs {gigabytes(need.of(tightest))} GB of memory ({details}), and there are "
        f"{gigabytes(tightest.bytes)} GB ({tightest.bound}): {lower}"
    )


def check_libraries(extra: str) -> None:
    """Raise UsageError where the libraries of an extra ("export", "train") do not even fit; they crash without room."""
    if extra in LIBRARIES and "torch" not in sys.modules:
        check_room(
            LIBRARIES[extra],
            "this command, which imports torch,",
            "raise the limit, or run it on a machine with more memory",
        )


def check_bundle(bundle: Bundle, options: LoadOptions) -> None:
    """Raise UsageError where a bundle loaded for the CPU, and one image judged by it, do not fit.

    Of a card nothing is asked here; "auto" counts as ONNX Runtime.
    """
    engine = named(DEFAULT if options.engine == AUTO else options.engine)
    if engine.on_card:
        return
    need = bundle_need(bundle.manifest, bundle.settings, engine.name, options.max_batch, bundle.tuning)
    samples = bundle.settings.sampler.samples
    fewer = "lower --samples (or max_batch in Python), " if samples > 1 else ""
    other = "" if engine.name == DEFAULT else f"try --engine {DEFAULT}, "
    remedy = f"{fewer}{other}or export it with a smaller --image-size"
    check_room(need, f"{bundle.path} with {samples} samples", remedy)


def bundle_need(
    manifest: Manifest, settings: Settings, engine_name: str, max_batch: int, tuning: Tuning | None = None
) -> Need:
    """Return what a bundle takes from loading to the verdict of one image, on an engine of the CPU."""
    samples = settings.sampler.samples
    parts = dict.fromkeys(("libraries", "weights", "activations", "arrays"), 0.0)
    mapped = 0.0
    roles = tuning.roles(manifest.settings) if tuning else settings.roles
    opened = {role: _engine(manifest, role, engine_name) for role in roles}
    for engine in {_FITTED[name] for name in opened.values()}:
        if engine.module not in sys.modules:
            parts["libraries"] += engine.library
            mapped += engine.mapped
    for role, name in opened.items():
        engine = _FITTED[name]
        step = role in STEPS
        file, graph, weights = _files(manifest, role, name)
        shifted = step and bool(manifest.network.get("scale_shift_norm"))
        at_once = 1 if name == "mnn" or role == "features" else min(samples, max_batch) if step else samples
        factor = _SCORED if engine is _ORT and not step else engine.shifted if shifted else engine.lives
        lives = factor * live(manifest, role, file) * at_once
        narrow = manifest.network.get("model_channels") in range(_WIDE)
        copies = _WINOGRAD if name == "mnn" and not narrow else engine.weights
        parts["weights"] += engine.graph * graph + copies * weights
        parts["activations"] += lives
        mapped += engine.mapped_graph * graph + engine.mapped_lives * lives
    parts["arrays"] = _arrays(manifest, settings)
    if tuning:
        parts["tuning"] = _tuned(manifest, tuning)
    return Need({name: round(size) for name, size in parts.items()}, round(mapped))


def _tuned(manifest: Manifest, tuning: Tuning) -> int:
    """Return roughly what a tuning's graphs take: their files with the features' weights, and one image in them."""
    names = {graph.file for graph in tuning.graphs.values()} | {"features.weights"}
    height, width = (tuning.photograph or manifest.preprocessing).network_size
    return sum(manifest.files[name].bytes for name in names if name in manifest.files) + _CHANNELS * height * width


def check_training(network: Mapping[str, Any], size: tuple[int, int], batch: int, processes: int) -> None:
    """Raise UsageError where the `processes` of a training run on this machine's CPU, with their shares, do not fit."""
    lives = batch * _TRAINED * step_bytes(network, size, guided=True)
    state = processes * _TRAINING_COPIES * weight_bytes(network)
    parts = {"libraries": processes * _TRAINING, "weights": state, "activations": round(lives)}
    what = f"training on batches of {batch} images of {size[0]} x {size[1]}"
    check_room(Need(parts, processes * _MAPPED), what, "lower --batch, --image-size or --base")


def check_export(network: Mapping[str, Any], size: tuple[int, int], settings: Settings) -> None:
    """Raise UsageError where an export does not fit: its gate runs two images' samples at once through torch."""
    samples, passes = 2 * settings.sampler.samples, settings.sampler.passes
    step = step_bytes(network, size, guided=any(one.guidance_scale for one in passes))
    arrays = samples * 3 * size[0] * size[1] * _FLOAT * (_PASS_ARRAYS + 3 * _GATE_STEPS)
    lives = step * (_TRAINED * samples + min(8, samples))
    parts = {"libraries": _EXPORTING, "weights": _EXPORT_COPIES * weight_bytes(network)}
    parts |= {"activations": round(lives), "arrays": arrays}
    what = (
        f"the export for {size[0]} x {size[1]} with {settings.sampler.samples} samples, and its comparison with torch,"
    )
    check_room(Need(parts, _MAPPED), what, "lower --samples or --image-size")


def check_batch(manifest: Manifest, settings: Settings, images: int) -> None:
    """Raise UsageError where the samples of a large batch of images, kept until all are judged, do not fit."""
    kept = 2 * images * settings.sampler.samples * _sample(manifest)  # each image's, and all of them put together
    if kept > BIG_BATCH:
        what = f"{images} images at once with {settings.sampler.samples} samples each"
        check_room(Need({"samples": kept}), what, "lower --batch or --samples")


def _engine(manifest: Manifest, role: str, engine_name: str) -> str:
    """Return which of _FITTED runs a graph: the default engine what the one named cannot read."""
    engine, graph = named(engine_name), manifest.graphs.get(role)
    if graph is not None and graph.session == "traced":
        return "torch"
    if not engine.complete and (graph is None or engine.form not in graph.variants):
        return DEFAULT
    return engine.form or DEFAULT


def _files(manifest: Manifest, role: str, engine: str) -> tuple[str, int, int]:
    """Return the file whose live bytes count, and the bytes of the graph's file and of its weights."""
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    graph = manifest.graphs.get(role)
    if graph is None:
        return "", 0, 0
    file = graph.variants.get(engine, graph.file)
    if engine == "torch":
        return file, 0, sizes[file]
    shared = "denoiser.weights" if role in STEPS else "features.weights"
    weights = sizes.get(f"{file}.weight", sizes.get(shared, 0))
    return graph.file if engine == "mnn" else file, sizes[file], weights


def _arrays(manifest: Manifest, settings: Settings) -> int:
    """Return the bytes of one image's passes outside the graphs: their arrays, and the noise that is kept."""
    sampler, size = settings.sampler, _sample(manifest)
    drawn = 0
    for one in sampler.passes:
        _, steps = plan_steps(manifest.schedule, sampler.time_index, one, sampler.eta_ddim)
        drawn += 1 + sum(bool(step.sigma_t) for step in steps)
    whole = sampler.samples * size
    return _PASS_ARRAYS * whole + min(drawn * whole, KEPT_BYTES)


def _sample(manifest: Manifest) -> int:
    height, width = manifest.preprocessing.network_size
    return 3 * height * width * _FLOAT


def gigabytes(count: int) -> str:
    """With one digit behind the point."""
    return f"{count / 1e9:.1f}"
