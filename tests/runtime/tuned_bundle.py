"""Builds the tiny bundle of test_detector.py with a tuning of tiny graphs, whose terms numpy can compute."""

import warnings
from dataclasses import replace

import numpy as np
import test_detector as tiny

from mdps.runtime import calibrate, load
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.manifest import Manifest, hash_files
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.settings import PassSettings
from mdps.runtime.tuning import Cascade, Term, Tuning

SIZE, SIDE = tiny.SIZE, 12
TERMS = (
    Term("map", "map", "reconstruction", 0.1, 0.5, 0.5),
    Term("pixels", "pixels", "reconstruction", 0.0, 2.0, 0.25),
    Term("position", "position", "photograph", -0.2, 0.7, 0.25),
    Term("residual", "shared", "residual", -1.0, 3.0, 1.0),
)


def photograph_graph(path):
    """Features: the photograph pooled to 6 x 6, and to 3 x 3."""
    nodes = [
        ("AveragePool", ["photograph"], f"photograph_features_{k}", {"kernel_shape": [s, s], "strides": [s, s]})
        for k, s in ((1, 2), (2, 4))
    ]
    shapes = [(f"photograph_features_{k}", ("B", 3, SIDE // s, SIDE // s)) for k, s in ((1, 2), (2, 4))]
    tiny.save(path, [("photograph", ("B", 3, SIDE, SIDE))], shapes, {}, nodes)


def of_reconstruction(size):
    return [("observation", ("B", 3, size, size)), ("posterior_samples", ("B", "S", 3, size, size))]


def pixels_graph(path, size=SIZE):
    """The mean over samples and channels of |y - x|."""
    nodes = [
        ("Unsqueeze", ["observation", "one"], "y", {}),
        ("Sub", ["posterior_samples", "y"], "r", {}),
        ("Abs", ["r"], "a", {}),
        ("ReduceMean", ["a", "axes"], "m", {"keepdims": 0}),
        ("Unsqueeze", ["m", "one"], "map", {}),
    ]
    outputs = [("map", ("B", 1, size, size))]
    tiny.save(path, of_reconstruction(size), outputs, {"one": np.array([1]), "axes": np.array([1, 2])}, nodes)


def residual_graph(path, size=SIZE):
    """The first channel of y minus the mean of its samples, at half the size."""
    constants = {"one": np.array([1]), "begin": np.array([0]), "end": np.array([1])}
    nodes = [
        ("ReduceMean", ["posterior_samples", "one"], "x", {"keepdims": 0}),
        ("Sub", ["observation", "x"], "r", {}),
        ("Slice", ["r", "begin", "end", "one"], "c", {}),
        ("AveragePool", ["c"], "map", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ]
    tiny.save(path, of_reconstruction(size), [("map", ("B", 1, size // 2, size // 2))], constants, nodes)


def position_graph(path, size=SIZE):
    """The mean over channels of the second features: 3 x 3."""
    nodes = [("ReduceMean", ["photograph_features_2", "one"], "map", {"keepdims": 1})]
    inputs = [("photograph_features_2", ("B", 3, 3, 3))]
    tiny.save(path, inputs, [("map", ("B", 1, 3, 3))], {"one": np.array([1])}, nodes)


GRAPHS = {"pixels": pixels_graph, "position": position_graph, "residual": residual_graph}


def fusion_graph(path, terms, size=SIZE):
    """Each map enlarged to the nearest pixel and scaled, their weighted sum, its largest pixel, where it exceeds 1."""
    constants = {"axes": np.array([1, 2, 3]), "limit": np.float32(1)}
    nodes, parts = [], []
    for term in terms:
        name, factor = term.name, term.weight / (term.high - term.low)
        constants[f"{name}.low"], constants[f"{name}.factor"] = np.float32(term.low), np.float32(factor)
        nodes += [
            ("Resize", [name, "", "", f"{name}.size"], f"{name}.large", {"mode": "nearest"}),
            ("Sub", [f"{name}.large", f"{name}.low"], f"{name}.above", {}),
            ("Mul", [f"{name}.above", f"{name}.factor"], f"{name}.part", {}),
        ]
        constants[f"{name}.size"] = np.array([1, 1, size, size])
        parts.append(f"{name}.part")
    nodes += [
        ("Sum", parts, "anomaly_map", {}),
        ("ReduceMax", ["anomaly_map", "axes"], "anomaly_score", {"keepdims": 0}),
        ("Greater", ["anomaly_map", "limit"], "over", {}),
        ("Cast", ["over"], "mask", {"to": 1}),
    ]
    batch = ("B", 1, size, size)
    outputs = [("anomaly_map", batch), ("anomaly_score", ("B",)), ("mask", batch)]
    tiny.save(
        path, [(term.name, ("B", 1, f"{term.name}.h", f"{term.name}.w")) for term in terms], outputs, constants, nodes
    )


def tuned_bundle(folder, terms=TERMS, cascade=None, settings=None):
    """The tiny bundle with a tuning."""
    return add_tuning(tiny.make_bundle(folder, settings), terms, cascade)


def add_tuning(folder, terms=TERMS, cascade=None, **changes):
    """Give a bundle a tuning whose sampler makes one plain pass of two steps for two samples, but for `changes`."""
    manifest = Manifest.read(folder, verify=False)
    names, size = {term.name for term in terms}, manifest.preprocessing.network_size[0]
    of_photograph = any(term.of == "photograph" for term in terms)
    for name in names - {"map"}:
        GRAPHS[name](folder / f"default.{name}.onnx", size)
    if of_photograph:
        photograph_graph(folder / "default.photograph.onnx")
    fusion_graph(folder / "default.fusion.onnx", terms, size)
    few = {"first_pass": PassSettings(150, 0.0, steps=2), "masked_pass": None, "samples": 2, "seed": 5} | changes
    roles = [*sorted(names - {"map"}), "fusion", *(["photograph"] if of_photograph else [])]
    reconstructs = any(term.of != "photograph" for term in terms)
    tuning = Tuning(
        sampler=replace(manifest.settings.sampler, **few) if reconstructs else None,
        photograph=Preprocessing((SIDE, SIDE)) if of_photograph else None,
        terms=terms,
        graphs={role: GraphEntry(f"default.{role}.onnx") for role in roles},
        cascade=cascade,
    )
    replace(manifest, files=hash_files(folder), tunings={"default": tuning}).write(folder)
    return folder


def band(folder, low, high):
    return tuned_bundle(folder, TERMS[2:3], Cascade(low, high, 0.5, 1.5))


def pictures(count=4, size=(31, 47), seed=0):
    """Of odd size and aspect, each at a level of its own."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60, (*size, 3), dtype=np.uint8) + np.uint8(40 * (index % 4)) for index in range(count)]


def quietly(detector, images, rate=0.1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return calibrate(detector, images, false_alarm_rate=rate)


def calibrated(folder, **options):
    with load(folder, calibrated=False, **options) as detector:
        calibration = quietly(detector, pictures(20))
    Manifest.read(folder).with_calibration("default", calibration).write(folder)
    return calibration
