"""The authors' published settings of each category of MVTec AD and BTAD."""

from dataclasses import dataclass

from mdps.runtime.errors import UsageError
from mdps.runtime.settings import Settings, reference_settings


@dataclass(frozen=True)
class Preset:
    """One row: scales w of the mask-making and the last pass, their noise levels T (0: no mask pass), mask lambda."""

    eta: float
    guidance_mask_pass: float
    guidance: float
    mask_steps: int
    test_steps: int
    mask_lambda: float

    def settings(self) -> Settings:
        return reference_settings(
            eta=self.eta, guidance_mask_pass=self.guidance_mask_pass, guidance=self.guidance,
            mask_steps=self.mask_steps, test_steps=self.test_steps, skip=20, mask_lambda=self.mask_lambda,
        )  # fmt: skip


PRESETS = {
    "mvtec/bottle": Preset(7, 50, 100, 200, 200, 0.12),
    "mvtec/cable": Preset(1, 50, 50, 250, 250, 0.19),
    "mvtec/capsule": Preset(7, 100, 100, 200, 200, 0.03),
    "mvtec/carpet": Preset(2, 0, 100, 0, 250, 0.15),
    "mvtec/grid": Preset(7, 0, 100, 0, 200, 0.15),
    "mvtec/hazelnut": Preset(7, 50, 0, 250, 200, 0.25),
    "mvtec/leather": Preset(7, 0, 100, 0, 200, 0.25),
    "mvtec/metal_nut": Preset(7, 50, 0, 250, 200, 0.25),
    "mvtec/pill": Preset(7, 50, 100, 150, 200, 0.12),
    "mvtec/screw": Preset(7, 50, 0, 200, 200, 0.15),
    "mvtec/tile": Preset(0, 0, 100, 0, 150, 0.15),
    "mvtec/toothbrush": Preset(7, 50, 50, 250, 200, 0.15),
    "mvtec/transistor": Preset(7, 50, 50, 200, 250, 0.18),
    "mvtec/wood": Preset(7, 0, 100, 0, 200, 0.15),
    "mvtec/zipper": Preset(7, 0, 100, 200, 200, 0.08),
    "btad/01": Preset(7, 100, 150, 200, 250, 0.05),
    "btad/02": Preset(7, 50, 200, 200, 250, 0.10),
    "btad/03": Preset(7, 50, 50, 200, 250, 0.10),
}


def preset(name: str) -> Settings:
    """Return the settings of a category, such as "mvtec/bottle"; UsageError that lists the known names."""
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name].settings()
