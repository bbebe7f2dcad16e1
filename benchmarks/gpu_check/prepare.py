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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mdps.benchmarks import demo
from mdps.benchmarks.bench import Spec, observation
from mdps.benchmarks.bench.eager import Eager
from mdps.benchmarks.bench.local import forward_flop
from mdps.benchmarks.data.textures import TextureSet
from mdps.benchmarks.gpu_check.checked import SCALARS, Reference, identity
from mdps.benchmarks.gpu_check.items import KIND, PHOTOGRAPHS, THINGS, Prepared, parsed
from mdps.benchmarks.kit import exit_code, say_on_stderr
from mdps.export import ExportOptions, export_bundle
from mdps.export.engine import Builder
from mdps.export.parity import TOLERANCES_OF
from mdps.export.plans import add_plans
from mdps.models import oracle as oracles
from mdps.models.checkpoints import save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.atomic import new_folder
from mdps.runtime.engines import named
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.machine import available_cpus, versions
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.settings import Settings

Arrays = dict[str, NDArray[Any]]
GUIDANCE = 100.0
"""The scale of the guided step where the passes have none."""


def make_reference(
    bundle: str,
    ckpt: str,
    threads: int,
    tolerances: Mapping[str, Mapping[str, float]],
    samples: Sequence[int],
    judged: Sequence[tuple[NDArray[np.float32], bool]] = (),
) -> Reference:
    """Runs the oracle on one picture: a step of each kind, features, a score, and whole detections with each N_s.

    `judged` are observations [3, H, W] and whether each has a defect; their scores, and a threshold half-way between
    the best defect and the worst good part, are the verdicts that an engine should come to.
    """
    spec = Spec("oracle", "torch", "eager", bundle, threads, ckpt=ckpt)
    eager = Eager(spec)
    manifest = eager.manifest
    y = observation(manifest.preprocessing.network_size)[None]
    arrays = _steps(eager, torch.from_numpy(y)) | _scoring(eager, torch.from_numpy(y))
    for count in samples:
        many = eager if count == eager.samples else Eager(replace(spec, samples=count))
        arrays |= {f"whole{count}.{name}": value for name, value in _whole(many, torch.from_numpy(y)).items()}
    if judged:
        arrays |= {f"verdict.{name}": value for name, value in _verdicts(eager, judged).items()}
    about = {
        "of": identity(manifest),
        "tolerances": {name: dict(allowed) for name, allowed in tolerances.items()},
        "forward_flop": forward_flop(manifest),
        "versions": versions("torch", "numpy"),
    }
    return Reference(arrays, about)


@torch.no_grad()
def _steps(eager: Eager, y: torch.Tensor) -> Arrays:
    """The first pass's first step under a half mask: all that goes into it, and what comes out."""
    oracle, (first, second, *others) = eager.passes[0]
    oracle = replace(oracle, guidance_scale=oracle.guidance_scale or GUIDANCE)
    sampler = eager.manifest.settings.sampler
    step = plan_steps(eager.manifest.schedule, sampler.time_index, sampler.first_pass, sampler.eta_ddim)[1][0]
    z, noise = first[:1], second[:1]
    mask = torch.zeros_like(y[:, :1])
    mask[..., : mask.shape[-1] // 2] = 1
    fed = {"observation": y, "mask": mask, "noise": noise, "mask_noise": z}
    found = {f"step.{name}": value.numpy() for name, value in fed.items()}
    found |= {f"step.{name}": np.asarray(getattr(step, name)) for name in SCALARS}
    found["step.guidance_scale"] = np.asarray(oracle.guidance_scale)
    all_noise = [noise] * (1 + len(others))
    for role, scale in (("guided_step", oracle.guidance_scale), ("plain_step", 0.0)):
        states = oracles.posterior_sampling(eager.eps, y, mask, z, all_noise, replace(oracle, guidance_scale=scale))
        x_t, x_s = next(states), next(states)
        found |= {"step.x_t": x_t.numpy(), f"{role}.x_s": x_s.numpy()}
        if oracle.known != "blend":
            a = step.alpha_t
            x_t = mask * x_t + (1 - mask) * (a**0.5 * y + (1 - a) ** 0.5 * z)
        eps, gradient = oracles.guidance_gradient(eager.eps, x_t, y, int(step.timestep), step.alpha_t, oracle)
        found[f"{role}.eps"] = eps.numpy()
        if scale:
            found[f"{role}.guidance_gradient"] = gradient.numpy()
    return found


@torch.no_grad()
def _scoring(eager: Eager, y: torch.Tensor) -> Arrays:
    """Features as unit vectors, as the graph gives them; the score of another picture as the posterior sample."""
    oracle, _ = eager.passes[0]
    sample = torch.from_numpy(observation((int(y.shape[-2]), int(y.shape[-1])), 1)[None])
    features = list(eager.features(y))
    anomaly_map = oracles.difference(y, sample, features, eager.features(sample), oracle)
    settings = eager.manifest.settings
    frozen = () if settings.mask.range == "per-image" else (torch.tensor(0.0), torch.tensor(1.0))
    units = [torch.nn.functional.normalize(feature, dim=1, eps=1e-8) for feature in features]
    return {
        "score.sample": sample.numpy(),
        "score.anomaly_map": anomaly_map.numpy(),
        "score.anomaly_score": oracles.image_score(anomaly_map, oracle).numpy(),
        "score.mask": oracles.mask_of(anomaly_map, oracle, *frozen).numpy(),
    } | {f"features.{index}": feature.numpy() for index, feature in enumerate(units, start=1)}


def _whole(eager: Eager, y: torch.Tensor) -> Arrays:
    found = eager.detect(y)
    return {
        "first_map": found.maps[0].numpy(),
        "first_score": found.scores[0].numpy(),
        "mask": found.masks[0].numpy(),
        "posterior_samples": found.samples[-1].numpy(),
        "anomaly_map": found.maps[-1].numpy(),
        "anomaly_score": found.scores[-1].numpy(),
    }


def _verdicts(eager: Eager, judged: Sequence[tuple[NDArray[np.float32], bool]]) -> Arrays:
    images = np.stack([image for image, _ in judged])
    scores = np.concatenate([eager.detect(torch.from_numpy(image[None])).scores[-1].numpy() for image in images])
    defective = np.array([defect for _, defect in judged])
    threshold = (scores[defective].min() + scores[~defective].max()) / 2
    return {"observations": images, "scores": scores, "threshold": np.asarray(threshold)}


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
            export_bundle(self._checkpoint(network), inner, options, say=say_on_stderr)
            manifest = Manifest.read(inner, verify=False)
            manifest = replace(manifest, name=out.name, settings=with_steps(manifest.settings, self.steps))
            manifest.write(inner)
            for path in list(inner.iterdir()):
                path.rename(folder / path.name)
            inner.rmdir()

    def _plans(self, bundle: Path, engine: str) -> None:
        manifest = Manifest.read(bundle)
        builder = Builder.of(named(engine), self.capabilities, manifest.precision)
        add_plans(bundle, manifest, builder, self.max_batch, say_on_stderr).write(bundle)

    def _oracle(self, network: str) -> None:
        bundle, own = self.prepared.bundle(network, "fp32"), network == "demo"
        samples = self.samples if own else (1,)  # sixteen of the authors' size take a processor minutes
        say_on_stderr("the torch oracle computes every stage")
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

    An untrained network would begin with a last layer of zeros, and any two engines agree about those.
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


def main(argv: list[str] | None = None) -> int:
    """Run the command; what goes wrong is one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.gpu_check.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("things", nargs="+", metavar="THING", help=THINGS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=_numbers(int), default=(1, 16))
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--compute-capability", type=_numbers(str), dest="capabilities")
    parser.add_argument("--authors-size", type=int, default=AUTHORS_SIZE, help="another side, for tests")
    return exit_code(lambda: make_all(**vars(parser.parse_args(argv))))


def make_all(things: Sequence[str], work: Path, **options: Any) -> None:
    """Make the things in the folder `work`; `options` are the other fields of `Maker`."""
    maker = Maker(Prepared(work), **options)
    for thing in things:
        parsed(thing)
    for thing in things:
        try:
            maker.make(thing)
        except OSError as error:
            raise MdpsError(f"{thing} cannot be written: {error}") from error


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
