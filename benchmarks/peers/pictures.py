"""The good images as anomalib takes them, read by the same code that reads them for our detector."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mdps.benchmarks.textures import PHOTOS, as_rgb, photograph
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

    module = LightningDataModule()
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
