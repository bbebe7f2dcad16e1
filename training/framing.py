"""How a recipe frames its images: what they are resized to, and whether their centre is cut."""

from collections.abc import Callable

from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Preprocessing

SIZES = {"paper": 256, "small": 64}
PAPER_CROP = {"mvtec-ad": 224}  # "resize all images to 256 and center crop to 224 for MVTec"; BTAD has no crop


def framing(
    recipe: str, layout: str, image_size: int | None, crop_size: int | None, *, say: Callable[[str], object]
) -> Preprocessing:
    """Return the preprocessing of `recipe` for images of a data set's `layout`; what is given wins, and 0 is no crop.

    The paper's crop is for its own size of 256; at another none is made unless `crop_size` asks for it. What was
    decided for the user is said. UsageError for a crop larger than the image.
    """
    size = image_size or SIZES[recipe]
    crop = crop_size or None
    if crop_size is None and recipe == "paper" and layout in PAPER_CROP:
        if size == SIZES["paper"]:
            crop = PAPER_CROP[layout]
            say(f"images are resized to {size} and the centre {crop} is cut, as in the paper (--crop-size 0: no cut)")
        else:
            say(f"no centre crop, as the paper's is for {SIZES['paper']} and these are {size} (--crop-size makes one)")
    if crop is not None and crop > size:
        raise UsageError(f"a crop of {crop} is larger than the images of {size}; choose at most {size}")
    return Preprocessing(image_size=(size, size), crop="input" if crop else "none", crop_size=crop)
