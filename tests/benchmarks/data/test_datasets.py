"""Each layout written as real files, and the shared data where it is there."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdps.benchmarks.data import find_categories, natural
from mdps.runtime.errors import ImageError, UsageError


def draw(path, size=(6, 4)):
    """A picture of `size` (W, H)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 80, 70)).save(path)


def mark(path, size=(6, 4), level=255, box=(1, 1, 3, 2), mode="L"):
    """A mask whose `box` (left, top, right, bottom) has `level`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new(mode, size, 0)
    picture.paste(level, box)
    picture.save(path)


def only(path):
    (category,) = find_categories(path)
    return category


def names(paths):
    return [path.name for path in paths]


def kinds(category):
    return [(sample.kind, sample.path.name, sample.defective, names(sample.masks)) for sample in category.test]


def write_mvtec(root, suffix=".png"):
    for name in ("000", "001", "010"):
        draw(root / "train" / "good" / f"{name}{suffix}")
    draw(root / "test" / "good" / f"000{suffix}")
    for kind in ("crack", "scratch"):
        draw(root / "test" / kind / f"000{suffix}")
        mark(root / "ground_truth" / kind / "000_mask.png")


@pytest.mark.parametrize(("name", "layout"), [("bottle", "mvtec-ad"), ("metal_plate", "mpdd"), ("pcb1", "visa")])
def test_mvtec_ad_and_what_is_laid_out_like_it(tmp_path, name, layout):
    write_mvtec(tmp_path / name)
    category = only(tmp_path / name)
    assert (category.name, category.layout, category.root) == (name, layout, tmp_path / name)
    assert names(category.train) == ["000.png", "001.png", "010.png"]
    assert kinds(category) == [
        ("crack", "000.png", True, ["000_mask.png"]),
        ("good", "000.png", False, []),
        ("scratch", "000.png", True, ["000_mask.png"]),
    ]
    assert category.problems == category.check() == ()
    assert category.test[0].truth().sum() == 2


def test_a_root_holds_many_categories_in_natural_order(tmp_path):
    for name in ("part10", "part2", "Part1"):
        write_mvtec(tmp_path / name)
    (tmp_path / "license").mkdir()
    (tmp_path / "readme.txt").write_text("not a category")
    (tmp_path / ".hidden" / "train" / "good").mkdir(parents=True)
    assert [category.name for category in find_categories(tmp_path)] == ["Part1", "part2", "part10"]


def test_mvtec_ad_2_uses_the_public_test_images_and_names_the_others(tmp_path):
    root = tmp_path / "can"
    draw(root / "train" / "good" / "000_regular.png")
    draw(root / "validation" / "good" / "000_regular.png")
    draw(root / "test_public" / "good" / "000_regular.png")
    draw(root / "test_public" / "bad" / "000_overexposed.png")
    mark(root / "test_public" / "ground_truth" / "bad" / "000_overexposed_mask.png")
    draw(root / "test_private" / "000.png")
    draw(root / "test_private_mixed" / "000.png")
    category = only(root)
    assert category.layout == "mvtec-ad-2"
    assert (len(category.train), len(category.validation)) == (1, 1)
    assert kinds(category) == [
        ("bad", "000_overexposed.png", True, ["000_overexposed_mask.png"]),
        ("good", "000_regular.png", False, []),
    ]
    private, mixed = category.problems
    assert "test_private has no labels" in private
    assert "test_private_mixed has no labels" in mixed


@pytest.mark.parametrize(("image", "mask"), [(".bmp", ".png"), (".bmp", ".bmp"), (".png", ".png")])
def test_btad_has_masks_of_the_same_stem(tmp_path, image, mask):
    root = tmp_path / "01"
    draw(root / "train" / "ok" / f"0000{image}")
    draw(root / "test" / "ok" / f"0000{image}")
    draw(root / "test" / "ko" / f"0001{image}")
    mark(root / "ground_truth" / "ko" / f"0001{mask}")
    category = only(root)
    assert (category.layout, len(category.train), category.check()) == ("btad", 1, ())
    assert kinds(category) == [("ko", f"0001{image}", True, [f"0001{mask}"]), ("good", f"0000{image}", False, [])]


VISA_ROWS = (
    "candle,train,normal,candle/Data/Images/Normal/0010.JPG,",
    "candle,train,normal,candle/Data/Images/Normal/0002.JPG,",
    "candle,test,anomaly,candle/Data/Images/Anomaly/000.JPG,candle/Data/Masks/Anomaly/000.png",
    "candle,test,normal,candle/Data/Images/Normal/0003.JPG,",
    "fryum,train,normal,fryum/Data/Images/Normal/000.JPG,",
)


def write_visa(root, rows=VISA_ROWS):
    for row in rows:
        _, _, _, image, mask = row.split(",")
        draw(root / image)
        if mask:
            mark(root / mask, level=2)  # VisA numbers the kinds of defects
    (root / "split_csv").mkdir()
    (root / "split_csv" / "1cls.csv").write_text("\n".join(["object,split,label,image,mask", *rows]) + "\n")


def test_visa_is_split_by_its_table(tmp_path):
    write_visa(tmp_path)
    candle, fryum = find_categories(tmp_path)
    assert (candle.name, candle.layout, fryum.name) == ("candle", "visa", "fryum")
    assert names(candle.train) == ["0002.JPG", "0010.JPG"]
    assert kinds(candle) == [("good", "0003.JPG", False, []), ("anomaly", "000.JPG", True, ["000.png"])]
    assert candle.check() == ()
    assert candle.test[1].truth().sum() == 2
    assert only(tmp_path / "candle") == candle


def test_what_visas_table_names_and_is_missing_is_named(tmp_path):
    write_visa(tmp_path)
    (tmp_path / "candle/Data/Images/Normal/0010.JPG").unlink()
    (tmp_path / "candle/Data/Masks/Anomaly/000.png").unlink()
    category = only(tmp_path / "candle")
    assert [problem.split(" is ")[0][-8:] for problem in category.problems] == ["0010.JPG", "/000.JPG"]
    assert category.test[1].masks == ()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "1cls.csv is missing"),
        ("", "damaged"),
        ("object,split\ncandle,train\n", "damaged"),
        ("object,split,label,image,mask\ncandle,train\n", "damaged"),
        ("object,split,label,image,mask\nfryum,train,normal,a.JPG,\n", "names no image of candle"),
    ],
)
def test_visa_without_its_table_is_an_error(tmp_path, table, says):
    write_visa(tmp_path)
    path = tmp_path / "split_csv" / "1cls.csv"
    path.unlink() if table is None else path.write_text(table)
    with pytest.raises(UsageError, match=says):
        find_categories(tmp_path / "candle")


def test_converted_visa_has_masks_of_the_same_stem(tmp_path):
    root = tmp_path / "candle"
    draw(root / "train" / "good" / "0000.JPG")
    draw(root / "test" / "bad" / "000.JPG")
    mark(root / "ground_truth" / "bad" / "000.png")
    category = only(root)
    assert (category.layout, kinds(category)) == ("visa", [("bad", "000.JPG", True, ["000.png"])])


def test_images_alone_are_for_training(tmp_path):
    for name in ("b.png", "a10.jpg", "a9.jpg"):
        draw(tmp_path / name)
    draw(tmp_path / "old" / "c.png")
    category = only(tmp_path)
    assert (category.layout, names(category.train), category.test) == ("plain", ["a9.jpg", "a10.jpg", "b.png"], ())
    assert "old is not used" in category.problems[0]


@pytest.mark.parametrize("good", ["good", "ok", "normal"])
@pytest.mark.parametrize("masks", ["masks/dent", "masks", "ground_truth/dent"])
def test_good_images_beside_folders_of_defects_are_split(tmp_path, good, masks):
    for index in range(12):
        draw(tmp_path / good / f"{index}.png")
    draw(tmp_path / "dent" / "a.png")
    draw(tmp_path / "dent" / "b.png")
    mark(tmp_path / masks / "a_mask.png")
    category = only(tmp_path)
    assert names(category.train) == [f"{index}.png" for index in range(12) if index not in (4, 9)]
    assert kinds(category) == [
        ("good", "4.png", False, []),
        ("good", "9.png", False, []),
        ("dent", "a.png", True, ["a_mask.png"]),
        ("dent", "b.png", True, []),
    ]
    split, missing = category.problems
    assert "2 of its 12 images" in split
    assert missing.endswith("b.png is defective and has no mask: it counts for image metrics only")


def test_good_images_without_defects_are_all_for_training(tmp_path):
    for index in range(7):
        draw(tmp_path / "good" / f"{index}.png")
    assert len(only(tmp_path).train) == 7
    assert only(tmp_path).problems == ()


@pytest.mark.parametrize("masks", ["test/masks/dent", "masks/dent", "ground_truth/dent", "test/ground_truth"])
def test_plain_folders_with_a_split_of_their_own(tmp_path, masks):
    draw(tmp_path / "train" / "0.png")
    draw(tmp_path / "train" / "spoilt" / "0.png")
    draw(tmp_path / "test" / "ok" / "0.png")
    draw(tmp_path / "test" / "dent" / "0.png")
    draw(tmp_path / "test" / "unsorted.png")
    draw(tmp_path / "validation" / "0.png")
    mark(tmp_path / masks / "0.png")
    category = only(tmp_path)
    assert (category.layout, len(category.train), len(category.validation)) == ("plain", 1, 1)
    assert kinds(category) == [("dent", "0.png", True, ["0.png"]), ("good", "0.png", False, [])]
    spoilt, unsorted = category.problems
    assert "spoilt is not used" in spoilt
    assert f"right in {tmp_path / 'test'} are not used" in unsorted


def test_test_images_alone_are_enough_to_evaluate(tmp_path):
    draw(tmp_path / "test" / "good" / "0.png")
    draw(tmp_path / "test" / "dent" / "0.png")
    category = only(tmp_path)
    assert (category.train, len(category.test)) == ((), 2)
    assert category.problems == (f"{tmp_path / 'test' / 'dent'} has no masks for its 1 images: "
                                 "they count for image metrics only",)  # fmt: skip


def test_one_mask_for_images_of_two_folders_is_refused(tmp_path):
    for kind in ("dent", "crack"):
        draw(tmp_path / "test" / kind / "0.png")
    mark(tmp_path / "masks" / "0.png")
    with pytest.raises(UsageError, match=r"0\.png could belong to .*crack.* or to .*dent"):
        find_categories(tmp_path)


def test_problems_of_masks_are_named_by_file(tmp_path):
    write_mvtec(tmp_path)
    for name in ("missing", "empty", "large", "broken", "fine"):
        draw(tmp_path / "test" / "crack" / f"{name}.png")
    masks = tmp_path / "ground_truth" / "crack"
    mark(masks / "empty_mask.png", level=0)
    mark(masks / "large_mask.png", size=(12, 8))
    mark(masks / "fine_mask.png")
    mark(masks / "stray_mask.png")
    (masks / "broken_mask.png").write_bytes((masks / "fine_mask.png").read_bytes()[:40])
    category = only(tmp_path)
    missing, stray = category.problems
    assert "missing.png is defective and has no mask" in missing
    assert "stray_mask.png is the mask of no image" in stray
    broken, empty, large = category.check()[2:]
    assert "broken_mask.png cannot be read as an image" in broken
    assert "empty_mask.png marks no defect pixel" in empty
    assert "large_mask.png has 12 x 8 pixels" in large
    assert "6 x 4" in large
    assert len([sample for sample in category.test if sample.defective]) == 7  # all count for image metrics
    for sample in category.test:
        if sample.path.stem in ("missing", "empty", "large", "broken"):
            with pytest.raises(ImageError, match=sample.path.stem):
                sample.truth()


def test_several_masks_are_united(tmp_path):
    write_mvtec(tmp_path)
    draw(tmp_path / "test" / "crack" / "001.png")
    masks = tmp_path / "ground_truth" / "crack"
    mark(masks / "000_mask_1.png", box=(0, 0, 1, 1))
    mark(masks / "001" / "000.png", box=(0, 0, 1, 1))
    mark(masks / "001" / "001.png", box=(5, 3, 6, 4))
    category = only(tmp_path)
    first, second = (sample for sample in category.test if sample.kind == "crack")
    assert names(first.masks) == ["000_mask.png", "000_mask_1.png"]
    expected = np.zeros((4, 6), dtype=bool)
    expected[1, 1:3] = expected[0, 0] = True
    assert (first.truth() == expected).all()
    assert np.argwhere(second.truth()).tolist() == [[0, 0], [3, 5]]


def test_what_is_no_image_is_passed_over(tmp_path):
    write_mvtec(tmp_path)
    (tmp_path / "test" / "crack" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "test" / "crack" / ".DS_Store").write_bytes(b"x")
    draw(tmp_path / "test" / "crack" / "._000.png")
    draw(tmp_path / "test" / "__MACOSX" / "000.png")
    (tmp_path / "train" / "good" / "notes.txt").write_text("x")
    draw(tmp_path / "train" / "good" / "folder.png" / "inner.png")
    category = only(tmp_path)
    assert (len(category.train), len(category.test), category.problems) == (3, 3, ())


def test_numbers_in_names_count_as_numbers():
    given = [Path(name) for name in ("a10.png", "a2.png", "A1.png", "a²3.png", "10.png", "9.png", "b.png", "a02.png")]
    expected = ["9.png", "10.png", "A1.png", "a02.png", "a2.png", "a10.png", "a²3.png", "b.png"]
    for order in (given, given[::-1]):
        assert names(sorted(order, key=natural)) == expected


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    write_mvtec(tmp_path / "metal_plate")
    monkeypatch.chdir(tmp_path / "metal_plate")
    assert (only(".").name, only(".").layout) == ("metal_plate", "mpdd")


def test_a_link_names_a_category(tmp_path):
    write_mvtec(tmp_path / "parts" / "metal_plate_2026")
    (tmp_path / "mvtec").mkdir()
    (tmp_path / "mvtec" / "bottle").symlink_to(tmp_path / "parts" / "metal_plate_2026", target_is_directory=True)
    assert only(tmp_path / "mvtec").name == "bottle"
    assert only(tmp_path / "mvtec" / "bottle").name == "bottle"


def test_what_is_no_data_set_is_an_error_that_says_what_was_looked_for(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "readme.txt").write_text("x")
    with pytest.raises(UsageError, match=r"like no known data set.*train/good.*test_public.*train/ok.*Data/Images"):
        find_categories(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        find_categories(tmp_path / "readme.txt")
    with pytest.raises(UsageError, match="is no folder"):
        find_categories(tmp_path / "absent")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    write_mvtec(tmp_path)
    (tmp_path / "test" / "crack").chmod(0)
    try:
        with pytest.raises(UsageError, match="crack cannot be read"):
            find_categories(tmp_path)
    finally:
        (tmp_path / "test" / "crack").chmod(0o755)


@pytest.mark.parametrize(
    ("name", "train", "good", "defective"),
    [("mvtec_bottle", 209, 20, 63), ("magnetic_tile", 400, 100, 388), ("deep_pcb", 160, 50, 80)],
)
def test_the_shared_data_are_complete(shared, name, train, good, defective):
    category = only(shared / "data" / name)
    assert (category.layout, len(category.train)) == ("mvtec-ad", train)
    assert sum(not sample.defective for sample in category.test) == good
    assert sum(sample.defective and len(sample.masks) == 1 for sample in category.test) == defective
    assert category.problems == ()
    for sample in category.test[::40]:
        assert sample.truth().shape == (256, 256)
        assert sample.truth().any() == sample.defective
