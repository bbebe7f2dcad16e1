"""The pieces of a check in the order of their value, and where the prepared things that they need lie."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mdps.benchmarks.bench import Spec
from mdps.benchmarks.options import CheckOptions
from mdps.runtime.engines import DEFAULT, ENGINES, Engine
from mdps.runtime.errors import require
from mdps.runtime.machine import available_cpus

NETWORKS = ("demo", "authors")
"""The network that ships with mdps, at 64 x 64; the authors' of 33 M parameters with seeded weights, at 256 x 256."""
KIND = re.compile(r"traced|fp32|fp16|(?P<of>fp32|fp16)x(?P<samples>\d+)")
"""A bundle's precision, or with a torch program in fp32. fp16x16 is for 16 samples an image: a plan has its range."""
PHOTOGRAPHS = "demo:photographs"
PLANNED = [engine.name for engine in ENGINES if engine.reads == "plans"]
THINGS = (
    f"{PHOTOGRAPHS} (to calibrate and judge); of {' and '.join(NETWORKS)}, such as demo: demo:fp32, demo:fp16, "
    "demo:traced (bundles), demo:fp16x16 (for 16 samples an image), demo:oracle (the oracle's arrays), "
    f"{' and '.join(f'demo:fp16:{name}' for name in PLANNED)} (plans)"
)
"""All that can be prepared, in words."""


def parsed(thing: str) -> list[str]:
    """Network, kind and, for plans, engine; UsageError for what is none of THINGS."""
    network, _, made = thing.partition(":")
    kind, plans, engine = made.partition(":")
    is_bundle = KIND.fullmatch(kind) is not None and (not plans or engine in PLANNED)
    known = (network in NETWORKS and (is_bundle or made == "oracle")) or thing == PHOTOGRAPHS
    require(known, f"there is no {thing!r} to prepare: choose among {THINGS}")
    return thing.split(":")


@dataclass(frozen=True)
class Prepared:
    """A work folder."""

    folder: Path

    def checkpoint(self, network: str) -> Path:
        """The denoiser a network's bundles are made from."""
        return self.folder / f"{network}.safetensors"

    def bundle(self, network: str, kind: str) -> Path:
        """A network's bundle of a KIND."""
        return self.folder / f"{network}-{kind}"

    def reference(self, network: str) -> Path:
        """The file of the oracle's arrays of a network."""
        return self.folder / f"{network}-oracle.npz"

    @property
    def photographs(self) -> Path:
        """Pictures to calibrate the demo's network on, in good, and to judge, in test."""
        return self.folder / "photographs"

    def has(self, thing: str) -> bool:
        """Whether `thing` (see `prepare`) is there."""
        if thing == PHOTOGRAPHS:
            return self.photographs.is_dir()
        network, kind, *engine = thing.split(":")
        if kind == "oracle":
            return self.reference(network).is_file()
        bundle = self.bundle(network, kind)
        if not (bundle / "manifest.json").is_file():
            return False
        return not engine or self._has_plans(bundle, engine[0])

    def _has_plans(self, bundle: Path, engine: str) -> bool:
        from mdps.runtime.manifest import Manifest

        return bool(Manifest.read(bundle, verify=False).plans_of(engine))


SECONDS = {"demo": 12.0, "authors": 25.0}
"""Of loading a network's bundle, comparing it and timing it; a first guess."""
PREPARING = {
    "demo:fp32": 20.0, "demo:fp16": 25.0, "demo:traced": 20.0, "demo:oracle": 20.0,
    "demo:fp32:tensorrt-rtx": 25.0, "demo:fp16:tensorrt-rtx": 25.0,
    "demo:fp32:tensorrt": 60.0, "demo:fp16:tensorrt": 60.0,
    "authors:fp32": 50.0, "authors:fp16": 70.0, "authors:traced": 50.0, "authors:oracle": 40.0,
    "authors:fp32:tensorrt-rtx": 80.0, "authors:fp16:tensorrt-rtx": 80.0,
    "authors:fp32:tensorrt": 120.0, "authors:fp16:tensorrt": 120.0,
}  # fmt: skip
PRESENT = 1.0
BUILDING = 4.0
"""How many times longer an engine takes to load that builds engines for that."""
MANY = 16
PEERS = {"patchcore": "PatchCore", "draem": "DRAEM"}


@dataclass(frozen=True)
class Way:
    """A way of ours to run a bundle: an engine, and whether the bundle is one whose guided step runs in torch."""

    engine: Engine
    traced: bool = False

    @property
    def name(self) -> str:
        """For people."""
        if self.traced:
            return f"guided step traced, torch on {'CUDA' if self.engine.on_card else 'the CPU'}"
        return f"{self.engine.title}{' plans' if self.plans else '' if self.engine.on_card else ', CPU'}"

    @property
    def plans(self) -> bool:
        """Whether it runs engine plans."""
        return self.engine.reads == "plans"


def _ways(on_card: bool) -> tuple[Way, ...]:
    """Those of every bundle that can be made here, as the table orders them; a traced one runs beside ONNX Runtime."""
    found = [engine for engine in ENGINES if engine.on_card == on_card and engine.reads in ("onnx", "plans")]
    ways = [Way(engine) for engine in found if not engine.arithmetic]
    return (*ways, Way(next(engine for engine in found if engine.provider), traced=True))


ON_CARD, ON_PROCESSOR = _ways(True), _ways(False)


@dataclass(frozen=True)
class Item:
    """One piece of work: something `prepare` makes, or a `spec` to be measured once what it `needs` is there.

    `family` is the way it is of: where that cannot be loaded at all, later ones are not tried.
    """

    name: str
    seconds: float
    thing: str = ""
    spec: Spec | None = None
    network: str = ""
    precision: str = "fp32"
    samples: int = 1
    needs: tuple[str, ...] = ()
    family: str = ""
    on_card: bool = True


def pieces(prepared: Prepared, options: CheckOptions, on_card: bool) -> list[Item]:
    """All of it: rates; the small network on every engine; the authors' in half precision; then the rest."""
    every = _Items(prepared, options, "cuda" if on_card else "cpu")
    found = [*every.rates()]
    for network, precision, samples in _cells(options):
        found += every.cell(network, precision, samples, _ways_in(precision, on_card))
    return [*found, *every.peers()]


def _ways_in(precision: str, on_card: bool) -> Sequence[Way]:
    """In half precision the processor's default engine says enough."""
    return ON_CARD if on_card else [way for way in ON_PROCESSOR if precision == "fp32" or way.engine.name == DEFAULT]


def _cells(options: CheckOptions) -> list[tuple[str, str, int]]:
    """Network, precision, N_s, the most valuable first."""
    order = [
        ("demo", "fp32", 1), ("authors", "fp16", 1), ("authors", "fp16", MANY), ("authors", "fp32", 1),
        ("demo", "fp16", 1), ("demo", "fp16", MANY), ("demo", "fp32", MANY), ("authors", "fp32", MANY),
    ]  # fmt: skip
    return [
        (network, precision, options.samples if count == MANY else 1) for network, precision, count in order
        if network in options.networks and precision in options.precisions
    ]  # fmt: skip


@dataclass(frozen=True)
class _Items:
    prepared: Prepared
    options: CheckOptions
    device: str

    @property
    def _place(self) -> str:
        return "the CPU" if self.device == "cpu" else "CUDA"

    def rates(self) -> Iterator[Item]:
        for precision in self.options.precisions:
            spec = replace(self._spec(f"matrix product, {precision}, {self._place}"), kind="rate", variant=precision)
            yield self._item(spec, 10.0, precision=precision)

    def cell(self, network: str, precision: str, samples: int, ways: Sequence[Way]) -> Iterator[Item]:
        """Every way with a network, and torch beside them, with what has to be prepared before."""
        for one in ways:
            if one.traced and precision != "fp32":
                continue  # a traced bundle has no other
            kind = "traced" if one.traced else precision
            kind += f"x{samples}" if one.plans and samples > 1 else ""
            things = [*self._oracle(network), f"{network}:{kind}"]
            things += [f"{network}:{kind}:{one.engine.name}"] if one.plans else []
            yield from self._made(things)
            spec = replace(
                self._spec(f"{one.name}, {_label(network, precision, samples)}"),
                kind="checked", variant=one.engine.name, samples=samples,
                bundle=str(self.prepared.bundle(network, kind)), reference=str(self.prepared.reference(network)),
                max_batch=max(8, samples),
            )  # fmt: skip
            seconds = SECONDS[network] * (2 if samples > 1 else 1) * (BUILDING if one.engine.builds else 1)
            yield self._item(spec, seconds, network, precision, samples, tuple(things), one.name)
        yield from self._torch(network, precision, samples)

    def _torch(self, network: str, precision: str, samples: int) -> Iterator[Item]:
        ways = {"autocast": "torch, autocast"} if precision == "fp16" else {"eager": "torch eager"}
        if samples == 1 and precision == "fp32":
            ways["authors"] = "torch as the authors wrote it"
        if self.device == "cpu":
            ways.pop("autocast", None)  # slower than float32 on most processors
        for way, name in ways.items():
            things = [f"{network}:fp32", f"{network}:oracle"]  # torch's settings are in the bundle
            yield from self._made(things)
            spec = replace(
                self._spec(f"{name} on {self._place}, {_label(network, precision, samples)}"),
                kind="torch", variant=way, samples=samples, bundle=str(self.prepared.bundle(network, "fp32")),
                ckpt=str(self.prepared.checkpoint(network)), reference=str(self.prepared.reference(network)),
            )  # fmt: skip
            yield self._item(spec, SECONDS[network], network, precision, samples, tuple(things), f"torch {way}")

    def peers(self) -> Iterator[Item]:
        """At the size of the largest network, as they are what a user would run instead."""
        network = self.options.networks[-1]
        for variant, name in PEERS.items():
            yield from self._made([f"{network}:fp32"])
            spec = replace(
                self._spec(f"{name} on {self._place}, {network}"), kind="peer", variant=variant,
                bundle=str(self.prepared.bundle(network, "fp32")),
            )  # fmt: skip
            yield self._item(spec, 25.0, network, "fp32", 1, (f"{network}:fp32",), name)

    def _oracle(self, network: str) -> list[str]:
        """The oracle's numbers, and the bundle they are computed from where they are not there yet."""
        oracle = f"{network}:oracle"
        return [oracle] if self.prepared.has(oracle) else [f"{network}:fp32", oracle]

    def _made(self, things: Sequence[str]) -> Iterator[Item]:
        for thing in dict.fromkeys(things):
            seconds = PRESENT if self.prepared.has(thing) else PREPARING.get(re.sub(r"x\d+", "", thing), PRESENT)
            network = thing.partition(":")[0]
            seconds = PRESENT if re.fullmatch(r"\w+:\w+x\d+", thing) else seconds  # a matter of links
            needs: tuple[str, ...] = (thing.rpartition(":")[0],) if thing.count(":") > 1 else ()
            needs += (f"{network}:fp32",) if thing.endswith(":oracle") else ()
            yield Item(f"prepare {thing}", seconds, thing=thing, network=network, needs=needs, on_card=False)

    def _item(
        self, spec: Spec, seconds: float, network: str = "", precision: str = "fp32", samples: int = 1,
        needs: tuple[str, ...] = (), family: str = "",
    ) -> Item:  # fmt: skip
        on_card = self.device != "cpu"
        return Item(spec.name, seconds, "", spec, network, precision, samples, needs, family or spec.name, on_card)

    def _spec(self, name: str) -> Spec:
        threads = self.options.threads or available_cpus()
        return Spec(name, "rate", "", "", threads, device=self.device, matrix_side=self.options.matrix_side)


def _label(network: str, precision: str, samples: int) -> str:
    return f"{network} {precision} N_s {samples}"
