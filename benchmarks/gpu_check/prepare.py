"""Makes one thing that a check needs: `python -m mdps.benchmarks.gpu_check.prepare THING --work FOLDER`.

Things: demo:fp32, demo:fp16, demo:fp16x16, demo:traced (bundles), demo:oracle (the oracle's arrays),
demo:fp16:tensorrt-rtx (plans in a bundle), and the same of the network `authors`; demo:photographs (to calibrate the
demo's network on and to judge). A process of its own makes each, so that a builder that crashes or hangs costs no more
than that.
"""

import argparse
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mdps.benchmarks import demo
from mdps.benchmarks.gpu_check.oracle import make_reference
from mdps.benchmarks.gpu_check.workfolder import KIND, PHOTOGRAPHS, THINGS, Prepared, parsed
from mdps.benchmarks.script import exit_code
from mdps.benchmarks.textures import TextureSet
from mdps.export import ExportOptions, export_bundle
from mdps.export.engine import Builder
from mdps.export.parity import TOLERANCES_OF
from mdps.export.plans import add_plans
from mdps.models.checkpoints import save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.atomic import new_folder
from mdps.runtime.engines import named
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import Settings
from mdps.runtime.threads import available_cpus

STEPS = 10
JUDGED_IMAGES = 4
"""Good ones of the demo's test set whose verdicts are compared, and as many defective ones."""
AUTHORS_SIZE = 256


@dataclass(frozen=True)
class Maker:
    """Makes things in a work folder. `steps` a pass; `max_batch` samples a plan takes."""

    prepared: Prepared
    steps: int = STEPS
    samples: tuple[int, ...] = (1, 16)
    max_batch: int = 16
    capabilities: tuple[str, ...] | None = None
    authors_size: int = AUTHORS_SIZE

    def make(self, thing: str) -> None:
        """One thing, and what it rests on where that is missing; nothing where it is there."""
        network, kind, *engine = parsed(thing)
        if self.prepared.has(thing):
            return
        self.prepared.folder.mkdir(parents=True, exist_ok=True)
        if thing == PHOTOGRAPHS:
            demo.save_photographs(self.prepared.photographs)
        elif kind == "oracle":
            self.make(f"{network}:fp32")
            self._oracle(network)
        elif engine:
            self.make(f"{network}:{kind}")
            self._plans(self.prepared.bundle(network, kind), engine[0])
        elif (many := KIND.fullmatch(kind)) and many["samples"]:
            self.make(f"{network}:{many['of']}")
            self._with_samples(self.prepared.bundle(network, many["of"]), int(many["samples"]))
        else:
            self._bundle(network, kind)

    def _with_samples(self, bundle: Path, samples: int) -> None:
        """The same bundle for another N_s beside it, its files linked and not copied; without plans."""
        manifest = Manifest.read(bundle)
        out = bundle.with_name(f"{bundle.name}x{samples}")
        plans = {plan.file for plan in manifest.plans}
        with new_folder(out, replace=True) as folder:
            for name in manifest.files.keys() - plans:
                _link(bundle / name, folder / name)
            settings = replace(manifest.settings, sampler=replace(manifest.settings.sampler, samples=samples))
            files = {name: entry for name, entry in manifest.files.items() if name not in plans}
            replace(manifest, name=out.name, settings=settings, plans=(), files=files).write(folder)

    def _checkpoint(self, network: str) -> Path:
        path = self.prepared.checkpoint(network)
        if network == "demo":
            if not path.is_file():
                shutil.copyfile(demo.CHECKPOINT, path)
        elif not path.is_file():
            save_denoiser(path, seeded(UNet(UNetConfig(image_size=self.authors_size))), NoiseSchedule.linear())
        return path

    def _bundle(self, network: str, kind: str) -> None:
        """Exported with a step a pass, whose graphs are those of any number: the gate of ten takes minutes at 256."""
        options = demo.OPTIONS if network == "demo" else ExportOptions()
        traced = {"guidance_backend": "traced"} if kind == "traced" else {"precision": kind}
        options = replace(options, steps=1, **traced)  # type: ignore[arg-type]
        out = self.prepared.bundle(network, kind)
        with new_folder(out, replace=True) as folder:
            inner = folder / "bundle"
            export_bundle(self._checkpoint(network), inner, options, say=_say)
            manifest = Manifest.read(inner, verify=False)
            manifest = replace(manifest, name=out.name, settings=with_steps(manifest.settings, self.steps))
            manifest.write(inner)
            for path in list(inner.iterdir()):
                path.rename(folder / path.name)
            inner.rmdir()

    def _plans(self, bundle: Path, engine: str) -> None:
        manifest = Manifest.read(bundle)
        builder = Builder.of(named(engine), self.capabilities, manifest.precision)
        add_plans(bundle, manifest, builder, self.max_batch, _say).write(bundle)

    def _oracle(self, network: str) -> None:
        bundle, own = self.prepared.bundle(network, "fp32"), network == "demo"
        samples = self.samples if own else (1,)  # sixteen of the authors' size take a processor minutes
        _say("the torch oracle computes every stage")
        reference = make_reference(
            str(bundle), str(self._checkpoint(network)), available_cpus(), TOLERANCES_OF, samples,
            judged(bundle) if own else (),
        )  # fmt: skip
        reference.save(self.prepared.reference(network))


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # a file system that knows no links
        shutil.copyfile(source, target)


def with_steps(settings: Settings, steps: int) -> Settings:
    """The same with so many steps a pass, in the paper's time index."""
    sampler = settings.sampler
    passes = [replace(one, steps=steps) for one in sampler.passes]
    return replace(
        settings,
        sampler=replace(sampler, first_pass=passes[0], masked_pass=passes[1] if len(passes) > 1 else None),
    )


def seeded(network: UNet) -> UNet:
    """Weights that keep the size of what goes through, the same on every machine; no layer is left at zero.

    An untrained network would begin with a last layer of zeros, and any two backends agree about those.
    """
    values: dict[str, Any] = {}
    for key, tensor in network.state_dict().items():
        z = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(tuple(tensor.shape)).astype(np.float32)
        if tensor.ndim > 1:
            z /= np.float32(np.sqrt(tensor[0].numel())) * np.float32(3 if key == "out.2.weight" else 1)
        else:
            z = 1 + np.float32(0.1) * z if key.endswith("weight") else np.float32(0.05) * z
        values[key] = torch.from_numpy(z)
    network.load_state_dict(values)
    return network.eval()


def judged(bundle: Path) -> list[tuple[NDArray[np.float32], bool]]:
    """Good and defective images of the demo's test set as observations; none without scikit-image."""
    try:
        samples = TextureSet(demo.PHOTO).test()
    except UsageError:
        return []
    see = Manifest.read(bundle, verify=False).preprocessing
    good = [one for one in samples if one.kind == "good"][:JUDGED_IMAGES]
    kinds = {one.kind: one for one in samples if one.kind != "good"}
    return [(see(one.image), one.kind != "good") for one in (*good, *list(kinds.values())[:JUDGED_IMAGES])]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; what goes wrong is one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.gpu_check.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("things", nargs="+", metavar="THING", help=THINGS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=_numbers(int), default=(1, 16))
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--compute-capability", type=_numbers(str))
    parser.add_argument("--authors-size", type=int, default=AUTHORS_SIZE, help="another side, for tests")
    given = parser.parse_args(argv)

    def work() -> None:
        maker = Maker(
            Prepared(given.work), given.steps, given.samples, given.max_batch, given.compute_capability,
            given.authors_size,
        )  # fmt: skip
        for thing in given.things:
            parsed(thing)
        for thing in given.things:
            try:
                maker.make(thing)
            except OSError as error:
                raise MdpsError(f"{thing} cannot be written: {error}") from error

    return exit_code(work)


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
