"""Laws of what is read, written and counted, for anything that hypothesis draws."""

import io
import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

from mdps.benchmarks.metrics.pixels import PixelMetrics
from mdps.benchmarks.metrics.tables import Cells
from mdps.runtime.calibration import Calibration, first_quantiles, good_threshold
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.manifest import SCHEMA_VERSION, CheckpointEntry, FileEntry, Manifest, PlanEntry, migrate
from mdps.runtime.preprocessing import Preprocessing, read_image, to_uint8
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import (
    EXIT_SHARES,
    MaskSettings,
    PassSettings,
    SamplerSettings,
    ScoreSettings,
    Settings,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SHARES = st.floats(0, 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

# Manifests


@st.composite
def passes(draw, index, is_first):
    amount = {"steps" if index == "paper" else "skip": draw(st.integers(1, 1000))}
    start = "observation" if is_first else draw(st.sampled_from(["observation", "stitched"]))
    scale = draw(st.floats(0, 1e6))
    target = "observation" if is_first or start == "stitched" else draw(st.sampled_from(["observation", "previous"]))
    amount |= {"resamples": draw(st.integers(1, 1000)), "start": start, "target": target}
    return PassSettings(draw(st.integers(1, 1000)), scale, **amount)


@st.composite
def samplers(draw):
    index = draw(st.sampled_from(["paper", "reference"]))
    masked = draw(st.none() | passes(index, False))
    samples = draw(st.integers(1, 4096))
    return SamplerSettings(
        time_index=index,
        mask_rule=draw(st.sampled_from(["blend", "replace", "inpaint"])),
        guidance_norm=draw(st.sampled_from(["l2", "squared"])),
        gradient=draw(st.sampled_from(["exact", "jacobian-free", "ddad"])),
        eta_ddim=draw(SHARES),
        first_pass=draw(passes(index, True)),
        masked_pass=masked,
        samples=samples,
        antithetic=samples % 2 == 0 and draw(st.booleans()),
        seed=draw(st.integers(0, 2**63 - 1)),
        noise=draw(st.sampled_from(["gaussian", "simplex"])),
        early_exit=draw(st.sampled_from([0.0, *EXIT_SHARES])) if masked else 0.0,
    )


SCORES = st.builds(
    ScoreSettings,
    backbone=TEXT,
    stages=st.lists(st.integers(1, 5), unique=True, min_size=1).map(tuple),
    eta=st.floats(0, 1e3),
    pixel=st.sampled_from(["l1", "squared"]),
    pool=st.sampled_from([0, 3]),
    align_corners=st.booleans(),
    feature_size=st.none() | st.integers(1, 512),
    smoothing_sigma=st.floats(0.1, 9),
    smoothing_kernel=st.integers(0, 20).map(lambda half: 2 * half + 1),
    map_scale=st.floats(0.1, 9),
    image_score=st.sampled_from(["top_mean", "softmax_top_sum"]),
    top=st.integers(1, 500),
)
CALIBRATIONS = st.builds(
    Calibration,
    threshold=FINITE,
    false_alarm_rate=st.floats(0.001, 0.999),
    expected_false_alarm_rate=SHARES,
    images=st.integers(1, 10**6),
    mask_low=st.floats(-9, 0),
    mask_high=st.floats(0, 9),
    map_low=st.floats(-9, 0),
    map_high=st.floats(0, 9),
    samples=st.integers(1, 99),
    seed=st.integers(0, 2**63 - 1),
    note=TEXT,
    first_quantiles=st.just(())
    | st.lists(FINITE, min_size=len(EXIT_SHARES), max_size=len(EXIT_SHARES)).map(lambda scores: tuple(sorted(scores))),
)
SCHEDULES = st.sampled_from([NoiseSchedule.linear(50), NoiseSchedule.cosine(30), NoiseSchedule.scaled_linear(40)])
SCHEDULES |= st.lists(st.floats(1e-12, 1 - 1e-12), min_size=1, max_size=20).map(lambda b: NoiseSchedule(tuple(b)))
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def preprocessings(draw):
    size = draw(st.tuples(st.integers(1, 512), st.integers(1, 512)))
    crop = draw(st.sampled_from(["none", "input", "metrics"]))
    roi = draw(st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99), st.integers(1, 99)))
    return Preprocessing(size, crop, None if crop == "none" else draw(st.integers(1, min(size))), roi=roi)


PRECISIONS = st.sampled_from(["fp32", "fp16", "bf16"])


def plans(files):
    batches = st.tuples(*[st.integers(1, 64)] * 3)
    return st.builds(
        PlanEntry, TEXT, files, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple), PRECISIONS, files, HASHES, batches,
        st.none() | batches, st.dictionaries(TEXT, st.integers(0, 99), max_size=2),
        st.sampled_from(["network", "engine"]),
    )  # fmt: skip


@st.composite
def manifests(draw):
    files = draw(
        st.dictionaries(
            st.from_regex(r"[a-zäß_ ]{1,9}\.onnx", fullmatch=True),
            st.builds(FileEntry, HASHES, st.integers(0, 2**70)),
            min_size=1,
            max_size=3,
        )
    )
    names = st.sampled_from(sorted(files))
    graphs = st.builds(GraphEntry, names, st.sampled_from(["ort", "traced"]), st.dictionaries(TEXT, names, max_size=2))
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=draw(TEXT),
        settings=Settings(
            draw(st.sampled_from(["paper", "reference"])),
            draw(samplers()),
            draw(SCORES),
            MaskSettings(draw(SHARES), draw(st.sampled_from(["per-image", "frozen", "dataset"]))),
        ),
        network=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        schedule=draw(SCHEDULES),
        prediction=draw(st.sampled_from(["eps", "v", "x0"])),
        preprocessing=draw(preprocessings()),
        calibrations=draw(st.dictionaries(TEXT, CALIBRATIONS, max_size=2)),
        files=files,
        graphs=draw(st.dictionaries(TEXT, graphs, max_size=2)),
        versions=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
        parity=draw(st.dictionaries(TEXT, JSON, max_size=2)),
        checkpoint=CheckpointEntry(draw(TEXT), draw(HASHES)),
        guidance_backend=draw(st.sampled_from(["onnx", "traced"])),
        precision=draw(PRECISIONS),
        plans=tuple(draw(st.lists(plans(names), max_size=2))),
    )


@given(manifest=manifests())
def test_a_manifest_of_any_settings_comes_back_from_its_text(manifest):
    text = json.dumps(manifest.to_json(), ensure_ascii=False, allow_nan=False)
    again = Manifest.from_json(migrate(json.loads(text), "m"), "m")
    assert again == manifest
    assert json.dumps(again.to_json(), ensure_ascii=False) == text


# Pictures

MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "I;16",
    "I;16B",
    "I",
    "F",
)
SIDES = st.integers(1, 9) | st.integers(1, 90)


@st.composite
def pictures(draw):
    """A PIL image of any mode and size, or a uint8 array, of random levels."""
    height, width = draw(SIDES), draw(SIDES)
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    levels = random.integers(0, 256, (height, width, 4), dtype=np.uint8)
    mode = draw(st.sampled_from([*MODES, "array", "array 1", "array 3", "array 4"]))
    if mode.startswith("array"):
        return levels[..., 0] if mode == "array" else levels[..., : int(mode[-1])]
    if mode in ("I;16", "I;16B"):
        return Image.frombytes(mode, (width, height), random.bytes(2 * height * width))
    if mode in ("I", "F"):
        return Image.fromarray(
            levels[..., 0].astype(np.int32 if mode == "I" else np.float32) * (257 if mode == "I" else 1)
        )
    if mode == "PA":
        return Image.merge("LA", [Image.fromarray(levels[..., n]) for n in (0, 3)]).convert("PA")
    if mode == "La":
        return Image.fromarray(levels).convert("LA").convert("La")
    return Image.fromarray(levels).convert(mode)


@given(picture=pictures(), height=st.integers(1, 40), width=st.integers(1, 40))
def test_a_picture_of_any_mode_and_size_becomes_one_size(picture, height, width):
    observation = Preprocessing((height, width))(picture)
    assert observation.shape == (3, height, width)
    assert observation.dtype == np.float32
    assert observation.min() >= -1
    assert observation.max() <= 1
    both_axes_at_once = np.asarray(read_image(picture).resize((width, height), Image.Resampling.BILINEAR))
    assert np.abs(to_uint8(observation).astype(int) - both_axes_at_once).max() <= 1


@given(picture=pictures())
def test_a_resize_stays_within_the_levels_of_its_picture(picture):
    rgb = np.asarray(read_image(picture)).reshape(-1, 3).astype(int)
    found = to_uint8(Preprocessing((7, 5))(picture)).reshape(-1, 3).astype(int)
    assert (found.min(axis=0) >= rgb.min(axis=0)).all()
    assert (found.max(axis=0) <= rgb.max(axis=0)).all()


@given(picture=pictures(), kind=st.sampled_from(["PNG", "TIFF", "BMP"]))
def test_a_picture_in_a_lossless_file_is_the_picture(picture, kind):
    kept = {"PNG": ("1", "L", "RGB"), "TIFF": ("1", "L", "RGB", "CMYK"), "BMP": ("1", "L", "RGB")}[kind]
    assume(isinstance(picture, Image.Image) and picture.mode in kept)
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    np.testing.assert_array_equal(np.asarray(read_image(buffer.getvalue())), np.asarray(picture.convert("RGB")))


# Thresholds

GOOD_SCORES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60).map(
    lambda values: np.array(values, np.float32)
)
RATES = st.floats(0.001, 0.999)


@given(scores=GOOD_SCORES, rates=st.tuples(RATES, RATES), seed=st.integers(0, 99))
def test_a_threshold_falls_with_the_rate_and_does_not_know_the_order(scores, rates, seed):
    strict, loose = (good_threshold(scores, rate) for rate in sorted(rates))
    assert strict[0] >= loose[0]
    assert strict[1] <= loose[1]
    shuffled = np.random.default_rng(seed).permutation(scores)
    assert good_threshold(shuffled, min(rates)) == strict
    assert first_quantiles(shuffled) == first_quantiles(scores)


@given(scores=GOOD_SCORES, rate=RATES)
def test_no_larger_share_of_the_good_parts_lies_above_than_was_asked_for(scores, rate):
    threshold, promised = good_threshold(scores, rate)
    assert threshold in scores
    assert np.count_nonzero(scores > threshold) <= rate * (len(scores) + 1) + 1e-6
    assert promised <= max(rate, 1 / (len(scores) + 1)) + 1e-9


@given(scores=GOOD_SCORES)
def test_quantiles_rise_and_are_scores_of_good_parts(scores):
    found = first_quantiles(scores)
    assert list(found) == sorted(found)
    assert set(found) <= set(scores.tolist())
    for share, value in zip(EXIT_SHARES, found, strict=True):
        below = np.count_nonzero(scores < value)
        assert below <= share * (len(scores) + 1) + 1e-6


# Pixel metrics


@st.composite
def counted(draw):
    """Masks and maps of a few images of equal size, with many ties."""
    count, height, width = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    truths = random.random((count, height, width)) < draw(st.floats(0.05, 0.95))
    maps = random.integers(0, draw(st.integers(1, 20)), truths.shape).astype(np.float32)
    return truths, maps


def metrics(truths, maps, **options):
    found = PixelMetrics(**options)
    for truth, values in zip(truths, maps, strict=True):
        found.add(truth, values)
    return found


def by_hand(truths, maps):
    """AUROC as the share of pairs, and AUPRO at 1 as a mean over regions and pairs; ties count one half."""
    good = maps[~truths]
    share = [np.mean((value > good) + 0.5 * (value == good)) for value in maps[truths]]
    return float(np.mean(share))


@given(seen=counted())
def test_metrics_of_few_pixels_are_those_of_all_pairs(seen):
    truths, maps = seen
    assume(truths.any() and not truths.all())
    found = metrics(truths, maps)
    assert found.auroc() == pytest.approx(by_hand(truths, maps), abs=1e-12)
    assert found.auroc() == pytest.approx(roc_auc_score(truths.ravel(), maps.ravel()), abs=1e-12)
    wanted = average_precision_score(truths.ravel(), maps.ravel())
    assert found.average_precision() == pytest.approx(wanted, abs=1e-12)
    for limit in (0.3, 1.0):
        assert 0 <= found.aupro(limit) <= 1 + 1e-12


@given(seen=counted(), scale=st.floats(0.1, 10), shift=st.floats(-5, 5), order=st.randoms(use_true_random=False))
def test_metrics_know_only_the_ranks_of_values_and_no_order_of_images(seen, scale, shift, order):
    truths, maps = seen
    assume(truths.any() and not truths.all())
    found = metrics(truths, maps)
    indices = list(range(len(maps)))
    order.shuffle(indices)
    moved = metrics(
        truths[indices], np.exp(maps[indices] * np.float32(scale / 20) + np.float32(shift)).astype(np.float32)
    )
    assume(len(np.unique(np.exp(maps * np.float32(scale / 20) + np.float32(shift)))) == len(np.unique(maps)))
    assert moved.auroc() == pytest.approx(found.auroc(), abs=1e-12)
    assert moved.average_precision() == pytest.approx(found.average_precision(), abs=1e-12)
    assert moved.aupro(0.3) == pytest.approx(found.aupro(0.3), abs=1e-9)


@given(seen=counted(), capacity=st.integers(2, 12))
def test_metrics_with_little_room_stay_within_their_bound(seen, capacity):
    truths, maps = seen
    assume(truths.any() and not truths.all())
    exact, coarse = (
        metrics(truths, maps),
        metrics(truths, maps, capacity=capacity, cells=(Cells(4, knee=0.5), Cells(4), Cells(4))),
    )
    assert abs(coarse.auroc() - exact.auroc()) <= coarse.error_bound() + 1e-12
    for limit in (0.3, 1.0):
        assert abs(coarse.aupro(limit) - exact.aupro(limit)) <= coarse.error_bound(limit) + 1e-12
