"""Fits a detector with anomalib's Lightning module; a fit that was cut off goes on where it was.

Good images are read by the code that reads them for our detector; feature weights are the project's, none downloaded.
"""

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mdps.benchmarks.data.textures import PHOTOS, as_rgb, photograph
from mdps.benchmarks.options import PeerOptions
from mdps.benchmarks.peers import PEERS, Recipe, settings_of
from mdps.models.backbones import LITE0, load_backbone
from mdps.models.checkpoints.files import read_file
from mdps.models.checkpoints.report import naming
from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Preprocessing

HELD_OUT = 10
"""Where a data set has no validation images, every tenth training image stands in, as EfficientAD's paper has it."""


class Pictures(Dataset[Any]):
    """Images as anomalib's items: float32 [3, H, W] in [0, 1], label good, an empty mask."""

    def __init__(self, paths: Sequence[Path], size: tuple[int, int]) -> None:
        self._paths = list(paths)
        self._read = Preprocessing(size)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        from anomalib.data import ImageItem

        image = torch.from_numpy((self._read(self._paths[index]) + 1) / 2)
        mask = torch.zeros(image.shape[-2:], dtype=torch.bool)
        return ImageItem(image=image, gt_label=torch.tensor(0), gt_mask=mask, image_path=str(self._paths[index]))


def data_module(
    train: Sequence[Path], held_out: Sequence[Path], size: tuple[int, int], batch: int, seed: int, whole: bool
) -> Any:
    """Lightning's holder of both sets; the training order depends on the seed alone.

    With `whole`, batches are whole ones, where there are images for one: some detectors fail on one or two images.
    """
    from anomalib.data import ImageBatch
    from lightning.pytorch import LightningDataModule

    def loader(paths: Sequence[Path], shuffled: bool) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(seed) if shuffled else None
        return DataLoader(
            Pictures(paths, size),
            batch,
            shuffle=shuffled,
            generator=order,
            collate_fn=ImageBatch.collate,
            drop_last=shuffled and whole and len(paths) >= batch,
        )

    module: Any = LightningDataModule()
    module.train_dataloader = lambda: loader(train, True)
    module.val_dataloader = lambda: loader(held_out, False)
    module.train_batch_size = batch  # EfficientAD asks
    return module


def write_textures(folder: Path) -> None:
    """Pictures for DRAEM to paste where no folder was given: scikit-image's photographs, whole and in quarters.

    UsageError where scikit-image is not installed.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for name in PHOTOS:
        photo = as_rgb(photograph(name))
        half = len(photo) // 2
        parts = [photo, photo[:half, :half], photo[:half, half:], photo[half:, :half], photo[half:, half:]]
        for index, part in enumerate(parts):
            Image.fromarray(part).save(folder / f"{name}_{index}.png")


def timm_name(backbone: str) -> str:
    """Return the name of a backbone of ours in timm and anomalib."""
    return "tf_efficientnet_lite0" if backbone == LITE0 else backbone


def layer_names(backbone: str, stages: Sequence[int]) -> list[str]:
    """timm's names of the layers at strides 2^(k+1), as anomalib wants them; UsageError for a stage it lacks."""
    with torch.device("meta"):
        network: Any = timm.create_model(timm_name(backbone), pretrained=False, features_only=True)
    strides, names = network.feature_info.reduction(), network.feature_info.module_name()
    missing = [stage for stage in stages if 2 ** (stage + 1) not in strides]
    if missing:
        raise UsageError(f"the backbone {backbone} has no stage {missing[0]} (its strides are {strides})")
    return [names[strides.index(2 ** (stage + 1))] for stage in stages]


@contextmanager
def local_backbone(backbone: str, weights: Path | None, stages: Sequence[int]) -> Iterator[list[str]]:
    """While it lasts, timm fills a pretrained backbone from a local file; yields the SHA-256 of the files read.

    Several of anomalib's detectors ask timm for pretrained weights and offer no way to name a file, so timm's entry
    is stood in for. UsageError and CheckpointError as from `load_backbone`.
    """
    create, read = timm.create_model, []

    def from_file(name: str, pretrained: bool = False, **settings: Any) -> Any:
        network: Any = create(name, pretrained=False, **settings)
        if pretrained:
            source = load_backbone(backbone, weights, tuple(stages))
            network.load_state_dict(source.network.state_dict())
            read.append(str(source.weights_sha256))
        return network

    with patch.object(timm, "create_model", from_file):
        yield read


def read_teacher(path: Path) -> Any:
    """The tensors of EfficientAD's teacher; CheckpointError naming the file where it cannot be read."""
    with naming(path):
        return read_file(path)[0]


SAVE_EVERY = timedelta(minutes=4)
LAST = "last"


def build(name: str, options: PeerOptions, scratch: Path) -> tuple[Any, dict[str, Any]]:
    """anomalib's Lightning module with local weights, and the facts about it that a result records.

    `scratch` takes files that it reads from. PeerSkippedError where something it needs is missing.
    """
    recipe, settings = PEERS[name], settings_of(name, options)
    facts: dict[str, Any] = {"settings": dict(settings)}
    settings |= _paths(name, options, scratch, facts)
    if recipe.stages:
        layers = layer_names(options.backbone, recipe.stages)
        settings["backbone"] = timm_name(options.backbone)
        if name != "fastflow":  # it has them built in
            settings["layers"] = layers
        facts |= {"backbone": options.backbone, "layers": layers}
    import anomalib.models

    kind = getattr(anomalib.models, recipe.model)
    torch.manual_seed(options.seed)  # PaDiM draws its channels here
    with local_backbone(options.backbone, options.backbone_weights, recipe.stages) as read:
        module = kind(
            **settings,
            pre_processor=kind.configure_pre_processor(image_size=options.size),
            post_processor=False,
            evaluator=False,
            visualizer=False,
        )
    if recipe.stages:
        facts["backbone_sha256"] = read[0]
    return module, facts


def _paths(name: str, options: PeerOptions, scratch: Path, facts: dict[str, Any]) -> dict[str, Any]:
    if name == "efficientad":
        facts["imagenette"] = str(options.imagenette)
        return {"imagenet_dir": options.imagenette}
    if name != "draem":
        return {}
    if options.textures is not None:
        facts["textures"] = str(options.textures)
        return {"dtd_dir": options.textures}
    facts["textures"] = "photographs of scikit-image in place of DTD"
    write_textures(scratch / "textures")
    return {"dtd_dir": scratch / "textures"}


def fit(name: str, module: Any, train: Sequence[Path], validation: Sequence[Path], options: PeerOptions,
        scratch: Path) -> dict[str, Any]:  # fmt: skip
    """Fits in place and says how long it took; what is half done lies in `scratch` and is taken up again."""
    from lightning.pytorch import Trainer, seed_everything

    recipe = PEERS[name]
    held_out = list(validation)
    if name == "efficientad":  # the only one that reads them: quantiles of its two maps
        teacher = read_teacher(options.teacher) if options.teacher else {}
        module.prepare_pretrained_model = lambda: module.model.teacher.load_state_dict(teacher)
        if not held_out:
            held_out, train = list(train[::HELD_OUT]), [p for i, p in enumerate(train) if i % HELD_OUT]
    seed_everything(options.seed, verbose=False)
    data = data_module(train, held_out, options.size, recipe.batch, options.seed, recipe.iterative)
    trainer = Trainer(**_trainer(recipe, module, options, scratch))
    before, start = _last(scratch), time.perf_counter()
    with quick_coreset():
        trainer.fit(module, datamodule=data, ckpt_path=before)
    seconds = time.perf_counter() - start
    if name == "efficientad":
        Trainer(**_machine(options)).validate(module, datamodule=data, verbose=False)
    facts: dict[str, Any] = {"train_images": len(train), "fit_seconds": round(seconds, 1)}
    if name == "patchcore":
        facts["patches"] = len(module.model.memory_bank)
    if recipe.iterative:
        published = recipe.steps or (recipe.epochs or 0) * trainer.num_training_batches
        # Batches, not Lightning's global_step, which counts CFLOW-AD's hundreds of updates a batch.
        facts |= {"steps": trainer.fit_loop.total_batch_idx + 1, "published_steps": int(published)}
        facts |= {"batch": recipe.batch, "resumed": before is not None}
    return facts


@contextmanager
def quick_coreset() -> Iterator[None]:
    """While it lasts, anomalib's greedy search makes no copy of all patches a centre, which was most of its time.

    Copies of 31 MB, of 30 images, were not given back to the system by glibc either, and filled 20 GB before the end.
    """
    from anomalib.models.components.sampling import KCenterGreedy

    def update_distances(search: Any, cluster_center: Any) -> None:
        centre = search.features[cluster_center].reshape(1, -1)
        found = torch.cdist(search.features, centre, compute_mode="donot_use_mm_for_euclid_dist")
        known = search.min_distances
        search.min_distances = found if known is None else torch.minimum(known, found)

    with patch.object(KCenterGreedy, "update_distances", update_distances):
        yield


def _trainer(recipe: Recipe, module: Any, options: PeerOptions, scratch: Path) -> dict[str, Any]:
    """Lightning's arguments: the detector's own first, then the budget."""
    from anomalib.engine.plugins import AnomalibCheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint, Timer

    reads_own_checkpoint = AnomalibCheckpointIO(extra_safe_globals=list(module.checkpoint_safe_globals()))
    arguments = _machine(options) | {"limit_val_batches": 0, "plugins": [reads_own_checkpoint]}
    arguments |= {key: value for key, value in module.trainer_arguments.items() if key != "devices"}
    if recipe.iterative:
        steps = [limit for limit in (recipe.steps, options.steps) if limit is not None]
        # -1 is Lightning's word for no limit
        arguments |= {"max_epochs": recipe.epochs or -1, "max_steps": min(steps, default=-1)}
        arguments["enable_checkpointing"] = True
        saved = ModelCheckpoint(scratch, LAST, enable_version_counter=False, train_time_interval=SAVE_EVERY)
        arguments["callbacks"] = [saved]
        if options.minutes is not None:
            # It counts on from a checkpoint, so that a fit that was cut off gets no second helping.
            arguments["callbacks"].append(Timer(timedelta(minutes=options.minutes), verbose=False))
    return arguments


def _machine(options: PeerOptions) -> dict[str, Any]:
    kind, _, index = options.device.partition(":")
    return {
        "accelerator": "gpu" if kind == "cuda" else kind,
        "devices": [int(index)] if index else 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": sys.stderr.isatty(),
    }


def _last(scratch: Path) -> Path | None:
    path = scratch / f"{LAST}.ckpt"
    return path if path.is_file() else None


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice, and without bars of anomalib in a pipe."""
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings(), patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=None)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
