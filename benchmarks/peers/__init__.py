"""Which detectors there are, what each takes, and how long it is fitted where nobody says.

Their code, losses, optimizers and schedules are anomalib's. Batches and lengths are those of the papers.
"""

from dataclasses import dataclass
from typing import Any

from mdps.benchmarks.options import PeerOptions
from mdps.runtime.errors import UsageError


class PeerSkippedError(UsageError):
    """A detector that cannot run with what is on this machine; the text is the reason its row gives."""


@dataclass(frozen=True)
class Recipe:
    """One detector. `stages` (of stride 2^(k+1)) are those of its backbone, () where it brings its own networks.

    `epochs` or `steps` is its published length; neither means one pass over the images. `only` names the backbones
    that anomalib's code accepts, where it is few; below images of side `least` its code fails.
    """

    title: str
    model: str
    stages: tuple[int, ...] = ()
    batch: int = 16
    epochs: int | None = None
    steps: int | None = None
    only: tuple[str, ...] = ()
    least: int = 32

    @property
    def iterative(self) -> bool:
        """Whether a budget can end the fit early: one pass over the images is never cut short."""
        return self.epochs is not None or self.steps is not None


_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2")

PEERS: dict[str, Recipe] = {
    # Roth et al., 2022: stages 2 and 3, nine neighbours.
    "patchcore": Recipe("PatchCore", "Patchcore", (2, 3)),
    # Defard et al., 2021: stages 1 to 3.
    "padim": Recipe("PaDiM", "Padim", (1, 2, 3)),
    # Zavrtanik et al., 2021: 700 epochs of batch 8.
    "draem": Recipe("DRAEM", "Draem", batch=8, epochs=700),
    # Batzner et al., 2024: 70,000 steps of one image.
    "efficientad": Recipe("EfficientAD-S", "EfficientAd", batch=1, steps=70_000),
    # Wang et al., 2021: 100 epochs of batch 32.
    "stfpm": Recipe("STFPM", "Stfpm", (1, 2, 3), batch=32, epochs=100),
    # Gudovskiy et al., 2022: stages 2 to 4, batch 32, 50 epochs.
    "cflow": Recipe("CFLOW-AD", "Cflow", (2, 3, 4), batch=32, epochs=50, least=128),
    # Rolih et al., 2024: 300 epochs of batch 32.
    "supersimplenet": Recipe("SuperSimpleNet", "Supersimplenet", (2, 3), batch=32, epochs=300, least=128),
    # Deng and Li, 2022: 200 epochs of batch 16; its decoder mirrors a ResNet.
    "reverse-distillation": Recipe(
        "Reverse Distillation", "ReverseDistillation", (1, 2, 3), batch=16, epochs=200, only=_RESNETS
    ),
    # Yu et al., 2021: 500 epochs of batch 32.
    "fastflow": Recipe("FastFlow", "Fastflow", (1, 2, 3), batch=32, epochs=500, only=("resnet18", "wide_resnet50_2")),
}

# Of the channels of all stages, as many as PaDiM's paper draws; 100 for networks it did not use.
_PADIM_FEATURES = {"wide_resnet50_2": 550}


def settings_of(name: str, options: PeerOptions) -> dict[str, Any]:
    """Arguments of the detector's class besides its backbone. PeerSkippedError where something it needs is missing."""
    recipe = PEERS[name]
    if recipe.only and options.backbone not in recipe.only:
        raise PeerSkippedError(
            f"{recipe.title} of anomalib runs on {', '.join(recipe.only)} only, not on {options.backbone}: "
            "give --backbone and --backbone-weights"
        )
    if min(options.size) < recipe.least:
        raise PeerSkippedError(
            f"{recipe.title} of anomalib needs images of at least {recipe.least} pixels a side, not "
            f"{options.size[0]} x {options.size[1]}: give a larger --image-size"
        )
    if name == "efficientad" and (options.teacher is None or options.imagenette is None):
        raise PeerSkippedError(
            "EfficientAD learns from a pretrained teacher and from ImageNette, and nothing is downloaded: give "
            "--set teacher=FILE (pretrained_teacher_small.pth of anomalib's efficientad_pretrained_weights) and "
            "--set imagenette=FOLDER"
        )
    own: dict[str, dict[str, Any]] = {
        "patchcore": {"coreset_sampling_ratio": options.coreset, "num_neighbors": 9},
        "padim": {"n_features": _PADIM_FEATURES.get(options.backbone, 100)},
    }
    return own.get(name, {})
