"""Data sets recognised from how their folders are laid out: the public ones, and plain folders.

| layout | train | good test images | defects | masks |
|---|---|---|---|---|
| mvtec-ad, mpdd | train/good | test/good | test/<defect> | ground_truth/<defect>/<stem>_mask.png |
| mvtec-ad-2 | train/good | test_public/good | test_public/bad | test_public/ground_truth/bad/<stem>_mask.png |
| btad | train/ok | test/ok | test/ko | ground_truth/ko/<stem>.png or .bmp |
| visa | by ../split_csv/1cls.csv | the same | Data/Images/Anomaly | Data/Masks/Anomaly/<stem>.png |
| visa, converted | train/good | test/good | test/bad | ground_truth/bad/<stem>.png |
| plain, split | train, or train/good | test/good | test/<defect> | masks or ground_truth |
| plain, not split | good, four of five | good, every fifth | any other folder | masks or ground_truth |
| plain, images alone | all of them | | | |

Validation images lie in validation/good, in a plain split also in validation. mpdd and converted visa are told from
mvtec-ad by the category's name. In plain folders "good" may also be called "ok" or "normal", `train` or `test` may be
absent, and masks lie in `masks` or `ground_truth`, beside or inside `test`, in folders named like the defects or all
together. Where nothing says which good images are for testing, every fifth is, in natural order.

Sources: Bergmann et al. 2019 (MVTec AD); Heckler-Kram et al. 2025, arXiv:2503.21622 (MVTec AD 2); Mishra et al. 2021
(BTAD); Zou et al. 2022 and the table `1cls.csv` of amazon-science/spot-diff (VisA); Jezek et al. 2021 (MPDD).
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mdps.benchmarks.data.samples import Category, Sample
from mdps.runtime.errors import UsageError
from mdps.runtime.image_files import is_image_name

LOOKED_FOR = (
    "train/good (MVTec AD, MPDD), test_public (MVTec AD 2), train/ok (BTAD), Data/Images (VisA), train, test or good "
    "with images (plain), or images alone"
)
_MPDD = frozenset({"bracket_black", "bracket_brown", "bracket_white", "connector", "metal_plate", "tubes"})
_VISA = frozenset(
    "candle capsules cashew chewinggum fryum macaroni1 macaroni2 pcb1 pcb2 pcb3 pcb4 pipe_fryum".split()  # noqa: SIM905
)
_GOOD = ("good", "ok", "normal")
_MASK_FOLDERS = ("masks", "ground_truth")
_MASK_ENDING = re.compile(r"[_-]mask([_-]?[0-9]+)?$", re.IGNORECASE)
_HELD_OUT = 5  # every fifth
_NO_MASK = "{} is defective and has no mask: it counts for image metrics only"


@dataclass(frozen=True)
class _Group:
    """Test images of one kind, and the folders that may hold their masks."""

    kind: str
    images: tuple[Path, ...]
    masks: tuple[Path, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """The parts of a category's folder by one layout."""

    layout: str
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    groups: tuple[_Group, ...]
    notes: tuple[str, ...] = ()


def find_categories(path: Path | str) -> tuple[Category, ...]:
    """The categories of a data set's root, or the one whose folder `path` is, in natural order.

    A folder of images and nothing else is one category with training images only. Nothing but names is read here,
    and VisA's table of its split; `Category.check` opens the masks.

    Raises:
        UsageError: `path` is no folder or cannot be read, no layout fits (the sentence says what was looked for), or
            VisA's table is missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the root of a data set, or the folder of one category")
    try:
        alone = recognise(folder)
        found = (alone,) if alone else tuple(filter(None, map(recognise, subfolders(folder))))
        if not found and (plain := images_only(folder)):
            found = (plain,)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UsageError(
            f"{folder} is laid out like no known data set: looked there and one folder below for {LOOKED_FOR}"
        )
    return found


def category_of(dataset: Path, name: str | None = None) -> Category:
    """The one category in `dataset`, or that of this name; UsageError where it has others or several."""
    categories = find_categories(dataset)
    chosen = [category for category in categories if name in (None, category.name)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(category.name for category in categories)
    raise UsageError(f"one category is measured at a time, {dataset} has {names}: give the folder of one")


def natural(path: Path) -> tuple[list[str | int], str]:
    """Sorting key: numbers inside a name count as numbers, case does not count, and no two names are equal."""
    words = re.split("([0-9]+)", path.name.casefold())
    return [int(word) if index % 2 else word for index, word in enumerate(words)], path.name


def images(folder: Path) -> tuple[Path, ...]:
    """The image files right in `folder`, hidden ones apart, in natural order; () where there is no such folder.

    Also what is called so and cannot be read, as in `image_files`: its turn comes, and it is named then.
    """
    if not folder.is_dir():
        return ()
    named = (entry for entry in folder.iterdir() if is_image_name(entry.name))
    return tuple(sorted((entry for entry in named if not (entry.is_dir() and any(entry.iterdir()))), key=natural))


def subfolders(folder: Path) -> tuple[Path, ...]:
    """The folders right in `folder`, hidden ones and what archives of macOS add apart, in natural order."""
    if not folder.is_dir():
        return ()
    inside = (
        entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "." and entry.name != "__MACOSX"
    )
    return tuple(sorted(inside, key=natural))


def recognise(folder: Path) -> Category | None:
    """The category whose folder this is, or None; a folder of images alone is none here."""
    if (folder / "Data" / "Images").is_dir():
        return _visa(folder)
    for layout in (_mvtec_ad_2, _btad, _mvtec_ad, _plain_split, _plain_good):
        plan = layout(folder)
        if plan is not None:
            category = _carried_out(folder, plan)
            return category if category.train or category.test else None
    return None


def images_only(folder: Path) -> Category | None:
    """A folder of images as training images, or None where it has none."""
    found = images(folder)
    notes = tuple(f"{place} is not used: its images are not right in {folder}" for place in subfolders(folder))
    return Category(_name(folder), "plain", folder, found, (), (), notes) if found else None


def _name(folder: Path) -> str:
    """Return the name it was found under: a link may give a category its usual name."""
    return folder.resolve().name if folder.name in ("", "..") else folder.name


def _mvtec_ad(folder: Path) -> _Plan | None:
    if not (folder / "train" / "good").is_dir():
        return None
    name = _name(folder)
    layout = "mpdd" if name in _MPDD else "visa" if name in _VISA else "mvtec-ad"
    groups = _groups(folder / "test", folder / "ground_truth")
    return _Plan(layout, images(folder / "train" / "good"), images(folder / "validation" / "good"), groups)


def _mvtec_ad_2(folder: Path) -> _Plan | None:
    public = folder / "test_public"
    if not public.is_dir():
        return None
    hidden = (folder / name for name in ("test_private", "test_private_mixed"))
    notes = tuple(f"{place} has no labels and is not used" for place in hidden if place.is_dir())
    groups = _groups(public, public / "ground_truth")
    return _Plan("mvtec-ad-2", images(folder / "train" / "good"), images(folder / "validation" / "good"), groups, notes)


def _btad(folder: Path) -> _Plan | None:
    if not (folder / "train" / "ok").is_dir():
        return None
    return _Plan("btad", images(folder / "train" / "ok"), (), _groups(folder / "test", folder / "ground_truth"))


def _plain_split(folder: Path) -> _Plan | None:
    train, test = folder / "train", folder / "test"
    if not (train.is_dir() or test.is_dir()):
        return None
    used = [train, *(train / name for name in _GOOD)]
    notes = [
        f"{place} is not used: only good images are trained on" for place in subfolders(train) if place not in used
    ]
    if images(test):
        notes.append(f"the images right in {test} are not used: sort them into {test / 'good'} and folders of defects")
    return _Plan(
        "plain",
        tuple(image for place in used for image in images(place)),
        tuple(image for place in (folder / "validation", folder / "validation" / "good") for image in images(place)),
        _groups(test, *_mask_folders(folder, test)),
        tuple(notes),
    )


def _plain_good(folder: Path) -> _Plan | None:
    good = next((place for name in _GOOD if images(place := folder / name)), None)
    if good is None:
        return None
    every = images(good)
    defects = [group for group in _groups(folder, *_mask_folders(folder)) if group.kind != "good" and group.images]
    if not defects:
        return _Plan("plain", every, (), ())
    kept = every[_HELD_OUT - 1 :: _HELD_OUT]
    note = f"{good} has no split of its own: {len(kept)} of its {len(every)} images, every fifth, are kept for testing"
    train = tuple(image for image in every if image not in set(kept))
    return _Plan("plain", train, (), (_Group("good", kept), *defects), (note,))


def _mask_folders(*places: Path) -> tuple[Path, ...]:
    return tuple(place / name for place in places for name in _MASK_FOLDERS)


def _groups(test: Path, *masks: Path) -> tuple[_Group, ...]:
    """One group a folder in `test`; its masks in a folder of the same name, or all together."""
    places = [place for place in subfolders(test) if place.name not in _MASK_FOLDERS]
    return tuple(
        _Group("good", images(place))
        if place.name in _GOOD
        else _Group(place.name, images(place), tuple(_own(mask, place.name) for mask in masks))
        for place in places
    )


def _own(masks: Path, kind: str) -> Path:
    return masks / kind if (masks / kind).is_dir() else masks


def _carried_out(folder: Path, plan: _Plan) -> Category:
    samples: list[Sample] = []
    problems, spare = list(plan.notes), []
    for group in plan.groups:
        shelf = _shelf(group.masks)
        found = [Sample(image, group.kind, group.kind != "good", shelf.pop(image.stem, ())) for image in group.images]
        problems += _without_mask(group, found)
        samples += found
        spare += [mask for masks in shelf.values() for mask in masks]
    owners = _owners(samples)
    problems += [f"{mask} is the mask of no image" for mask in dict.fromkeys(spare) if mask not in owners]
    return Category(_name(folder), plan.layout, folder, plan.train, plan.validation, tuple(samples), tuple(problems))


def _owners(samples: Sequence[Sample]) -> dict[Path, Path]:
    """The image of each mask; UsageError where a mask could belong to images of two folders."""
    owners: dict[Path, Path] = {}
    for sample in samples:
        for mask in sample.masks:
            if mask in owners:
                raise UsageError(
                    f"{mask} could belong to {owners[mask]} or to {sample.path}: "
                    "sort the masks into folders named like the defects"
                )
            owners[mask] = sample.path
    return owners


def _shelf(folders: Iterable[Path]) -> dict[str, tuple[Path, ...]]:
    """The masks in `folders` by the stem of the image they belong to."""
    found: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        for mask in images(folder):
            found[_MASK_ENDING.sub("", mask.stem)].append(mask)
        for several in subfolders(folder):
            found[several.name] += images(several)
    return {stem: tuple(masks) for stem, masks in found.items() if masks}


def _without_mask(group: _Group, samples: Sequence[Sample]) -> list[str]:
    bare = [sample.path for sample in samples if sample.defective and not sample.masks]
    if bare and not any(place.is_dir() for place in group.masks):
        return [f"{bare[0].parent} has no masks for its {len(bare)} images: they count for image metrics only"]
    return [_NO_MASK.format(path) for path in bare]


def _visa(folder: Path) -> Category:
    """VisA as it is downloaded: the table of the one-class split names the images of every category."""
    root, name = folder.resolve().parent, folder.resolve().name
    table = root / "split_csv" / "1cls.csv"
    rows = {root / row["image"]: row for row in _rows(table) if row["object"] == name}
    if not rows:
        raise UsageError(f"{table} names no image of {name}: use the table of the same download")
    present = {path: rows[path] for path in sorted(rows, key=natural) if path.is_file()}
    train = tuple(path for path, row in present.items() if (row["split"], row["label"]) == ("train", "normal"))
    test = [_visa_sample(root, row) for row in present.values() if row["split"] == "test"]
    test.sort(key=lambda sample: sample.defective)
    problems = [f"{path} is named in {table} and missing" for path in rows if path not in present]
    problems += [_NO_MASK.format(sample.path) for sample in test if sample.defective and not sample.masks]
    return Category(name, "visa", folder, train, (), tuple(test), tuple(problems))


def _visa_sample(root: Path, row: dict[str, str]) -> Sample:
    if row["label"] == "normal":
        return Sample(root / row["image"], "good", False)
    mask = root / row["mask"]
    return Sample(root / row["image"], "anomaly", True, (mask,) if mask.is_file() else ())


def _rows(table: Path) -> list[dict[str, str]]:
    if not table.is_file():
        raise UsageError(f"{table} is missing: VisA's split is in it, copy the folder split_csv of the download there")
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    wanted = {"object", "split", "label", "image", "mask"}
    if not rows or any(None in row.values() or not wanted <= row.keys() for row in rows):
        raise UsageError(f"{table} is damaged: its columns should be object, split, label, image and mask")
    return rows
