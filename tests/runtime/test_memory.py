"""Room on a card: the estimate against what the graphs of a real bundle need, the sentence, the measurement."""

import json
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import pytest

from mdps.runtime import placement
from mdps.runtime.cards import Card
from mdps.runtime.errors import BackendError
from mdps.runtime.manifest import FileEntry, Manifest
from mdps.runtime.memory import CARD_LIBRARIES, Need, estimate
from mdps.runtime.placement import check_free, measurement_key, remember

GB = 10**9
CARD = Card(0, "GPU-a", "NVIDIA L4", "8.9", 2 * GB, 24 * GB, "580.1")
HERE = "a key"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / placement.FILE_NAME


def live_bytes(path, batch):
    """The most that lives at once when the nodes run in the file's order and nothing is kept longer than needed."""
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = batch
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    sizes = {}
    for value in (*graph.value_info, *graph.output):
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        sizes[value.name] = prod(shape) * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).itemsize
    last = {name: place for place, node in enumerate(graph.node) for name in node.input}
    last |= {value.name: len(graph.node) for value in graph.output}
    live = most = 0
    for place, node in enumerate(graph.node):
        live += sum(sizes[name] for name in node.output)
        most = max(most, live)
        gone = {name for name in (*node.input, *node.output) if last.get(name, place) == place}
        live -= sum(sizes.get(name, 0) for name in gone)
    return most


@pytest.mark.parametrize("role", ["guided_step", "plain_step", "ddad_step"])
def test_the_estimate_covers_what_lives_at_once_in_the_real_graphs(tiny_bundle, role):
    manifest = Manifest.read(tiny_bundle)
    for samples in (1, 4):
        needed = live_bytes(tiny_bundle / manifest.graphs[role].file, samples)
        assert needed <= estimate(manifest, [role], samples).parts["activations"] <= 2.5 * needed


def test_weights_are_counted_once_a_graph(tiny_bundle):
    manifest = Manifest.read(tiny_bundle)
    size = {name: entry.bytes for name, entry in manifest.files.items()}
    both = estimate(manifest, ["guided_step", "plain_step"], 1)
    steps = size["guided_step.onnx"] + size["plain_step.onnx"]
    assert both.parts["weights"] == 2 * size["denoiser.weights"] + steps
    assert both.total == both.parts["weights"] + both.parts["activations"] + CARD_LIBRARIES
    assert estimate(manifest, ["score"], 1).parts["weights"] == size["features.weights"] + size["score.onnx"]
    assert estimate(manifest, ["score"], 1, {"score": "features.onnx"}).parts["weights"] == size["features.onnx"]


def test_half_precision_and_fewer_samples_need_less(tiny_bundle):
    manifest = Manifest.read(tiny_bundle)
    half = replace(manifest, precision="fp16")
    one = estimate(manifest, ["guided_step"], 1)
    assert estimate(half, ["guided_step"], 1).parts["activations"] < one.parts["activations"]
    assert estimate(manifest, ["guided_step"], 8).parts["activations"] == 8 * one.parts["activations"]


def test_a_card_with_too_little_free_is_refused_with_all_numbers():
    need = Need({"weights": GB, "activations": 3 * GB // 2, "libraries": 6 * GB // 10})
    with pytest.raises(BackendError) as refused:
        check_free(CARD, need, HERE, "bundles/a")
    assert str(refused.value).startswith(
        "bundles/a needs 3.1 GB (estimated: weights 1.0, activations 1.5, libraries 0.6), "
        "card 0 (NVIDIA L4) has 2.0 free of 24.0: close what else is on it"
    )
    roomy = replace(CARD, index=1, uuid="GPU-b", free=20 * GB)
    with pytest.raises(BackendError, match=r"choose card 1 \(NVIDIA L4, GPU-b\), which has 20\.0, close what else"):
        check_free(CARD, need, HERE, "bundles/a", (CARD, roomy))
    for card in (roomy, replace(CARD, free=need.total), replace(CARD, free=None, total=None)):
        check_free(card, need, HERE, "bundles/a")


def test_a_measurement_replaces_the_estimate(cache):
    need = Need({"weights": GB, "activations": 2 * GB, "libraries": CARD_LIBRARIES})
    remember(HERE, 3 * GB // 2)
    check_free(CARD, need, HERE, "bundle")
    with pytest.raises(BackendError, match=r"needs 3\.6 GB .estimated"):
        check_free(CARD, need, "another key", "bundle")
    remember(HERE, 5 * GB // 2)
    with pytest.raises(BackendError, match=r"needs 2\.5 GB \(measured on this kind of card, see .*card_memory\.json"):
        check_free(CARD, Need({}), HERE, "bundle")
    remember(HERE, -5)  # something else was closed meanwhile
    assert list(json.loads(cache.read_text()).values()) == [5 * GB // 2]


@pytest.mark.parametrize("content", ["", "[]", '{"a": "b"}', "{"])
def test_a_damaged_measurement_is_none(cache, content):
    cache.parent.mkdir()
    cache.write_text(content)
    check_free(CARD, Need({"activations": GB}), HERE, "bundle")
    remember(HERE, GB)
    assert json.loads(cache.read_text()) == {HERE: GB}


def test_a_measurement_that_cannot_be_kept_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "file" / "inside"))
    remember(HERE, GB)
    check_free(CARD, Need({"activations": GB}), HERE, "bundle")


def test_another_bundle_card_or_engine_is_another_situation(tiny_bundle):
    manifest = Manifest.read(tiny_bundle)
    one = measurement_key(manifest, CARD, "onnxruntime 1.31 cuda", 8)
    others = [
        measurement_key(
            replace(manifest, files={**manifest.files, "more": FileEntry("0" * 64, 1)}),
            CARD,
            "onnxruntime 1.31 cuda",
            8,
        ),
        measurement_key(manifest, replace(CARD, name="NVIDIA A2"), "onnxruntime 1.31 cuda", 8),
        measurement_key(manifest, CARD, "onnxruntime 1.32 cuda", 8),
        measurement_key(manifest, CARD, "onnxruntime 1.31 cuda", 16),
    ]
    assert one == measurement_key(manifest, replace(CARD, index=3, free=0), "onnxruntime 1.31 cuda", 8)
    assert len({one, *others}) == 5
