"""Where the time of a step goes, by the engines' own profiles: `python -m mdps.benchmarks.step_profile BUNDLE`.

Needs one of onnxruntime, openvino and MNN. The graph runs on one image with the threads this process may use; profiling
costs a few per cent itself.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.script import exit_code
from mdps.runtime.choice import installed
from mdps.runtime.errors import BundleError
from mdps.runtime.manifest import GraphEntry, Manifest
from mdps.runtime.mnn import capture_output
from mdps.runtime.openvino import compile_options, has_bfloat16
from mdps.runtime.ort import PROVIDERS, session_options
from mdps.runtime.session import ARITHMETIC, OWN_FILES, engine_of
from mdps.runtime.threads import available_cpus

SCALARS = {"timestep": 99.0, "alpha_t": 0.6, "alpha_s": 0.7, "sigma_t": 0.1, "guidance_scale": 100.0}
Shares = dict[str, float]
"""Milliseconds by kind of operation."""


def feeds_of(names: Sequence[str], size: tuple[int, int]) -> dict[str, NDArray[np.float32]]:
    """One image of noise, and a step from the middle of a pass."""
    noise = np.random.RandomState(0).standard_normal((1, 3, *size)).astype(np.float32)
    arrays = {"mask": np.ones((1, 1, *size), np.float32)}
    arrays |= {name: np.asarray(value, np.float32) for name, value in SCALARS.items()}
    return {name: arrays.get(name, noise) for name in names}


def onnxruntime_profile(path: Path, size: tuple[int, int], runs: int) -> Shares:
    """Of the fastest of `runs`, as ONNX Runtime's profile says."""
    import onnxruntime

    provider = PROVIDERS["cpu"]
    options = session_options(onnxruntime, available_cpus(), provider)
    options.enable_profiling = True
    with TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
        feeds = feeds_of([node.name for node in session.get_inputs()], size)
        for _ in range(runs):
            session.run(["x_s"], feeds)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    best = min((event for event in events if event["name"] == "model_run"), key=lambda event: event["dur"])
    shares: Counter[str] = Counter()
    for event in events:
        inside = best["ts"] <= event["ts"] <= best["ts"] + best["dur"]
        if inside and event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            shares[event["args"]["op_name"]] += event["dur"] / 1000
    return dict(shares)


def openvino_profile(path: Path, size: tuple[int, int], runs: int, precision: str = "f32") -> Shares:
    """Of the last of `runs`, as OpenVINO counts; arithmetic that it joined is a Subgraph."""
    import openvino

    core = openvino.Core()
    model = core.read_model(path.resolve())
    feeds = feeds_of([node.get_any_name() for node in model.inputs], size)
    model.reshape({name: list(array.shape) for name, array in feeds.items()})
    request = core.compile_model(
        model, "CPU", compile_options(available_cpus(), precision) | {"PERF_COUNT": True}
    ).create_infer_request()
    for _ in range(runs):
        request.infer(feeds)
    shares: Counter[str] = Counter()
    for node in request.get_profiling_info():
        shares[node.node_type] += node.real_time.total_seconds() * 1000
    return dict(shares)


def table(shares: Shares) -> str:
    """Rows of kind, ms and share, the largest first; what is below half a per cent in one row."""
    total = sum(shares.values())
    large = [(kind, ms) for kind, ms in Counter(shares).most_common() if ms >= total / 200]
    rows = [*large, ("the rest", total - sum(ms for _, ms in large))]
    return "\n".join(f"| {kind} | {ms:,.1f} | {100 * ms / total:.1f} % |" for kind, ms in rows)


def mnn_profile(path: Path, size: tuple[int, int], runs: int) -> Shares:
    """Of the fastest of `runs`, by the clock around each operation."""
    with capture_output():
        import MNN

        net = MNN.Interpreter(str(path))
        session = net.createSession({"backend": "CPU", "numThread": available_cpus(), "precision": "high"})
    inputs = net.getSessionInputAll(session)
    given = feeds_of(list(inputs), size)
    start, shares = 0.0, dict[str, float]()
    found: list[Shares] = []

    def before(*_: Any) -> bool:
        nonlocal start
        start = time.perf_counter()
        return True

    def after(_: Any, operation: Any) -> bool:
        kind = operation.getType()
        shares[kind] = shares.get(kind, 0.0) + (time.perf_counter() - start) * 1000
        return True

    for _ in range(runs):
        for name, tensor in inputs.items():
            array = np.ascontiguousarray(given[name])
            kinds = MNN.Halide_Type_Float, array, MNN.Tensor_DimensionType_Caffe
            tensor.copyFrom(MNN.Tensor(tensor.getShape(), *kinds))
        shares.clear()
        net.runSessionWithCallBackInfo(session, before, after)
        found.append(dict(shares))
    return min(found, key=lambda one: sum(one.values()))


ENGINES: dict[str, Callable[[Path, tuple[int, int], int], Shares]] = {
    "onnxruntime": onnxruntime_profile,
    "openvino": openvino_profile,
    "openvino-bf16": partial(openvino_profile, precision="bf16"),
    "mnn": mnn_profile,
}


def _runs(backend: str, graph: GraphEntry) -> bool:
    if engine_of(backend) not in installed() or (backend in OWN_FILES and backend not in graph.variants):
        return False
    if backend not in ARITHMETIC:
        return True
    import openvino

    return has_bfloat16(openvino.Core())


def report(bundle: Path, role: str, runs: int) -> None:
    """Print a table an engine."""
    manifest = Manifest.read(bundle)
    graph = manifest.graphs.get(role)
    if graph is None or graph.session != "ort":
        raise BundleError(f"{bundle} has no ONNX graph {role!r}: choose another --graph")
    for backend, profile in ENGINES.items():
        if not _runs(backend, graph):
            print(f"{backend} does not run here, or the bundle has no file for it", file=sys.stderr)
            continue
        file = graph.variants.get(engine_of(backend), graph.file)
        shares = profile(bundle / file, manifest.preprocessing.network_size, runs)
        print(f"\n{backend}, {file}: {sum(shares.values()):,.0f} ms\n\n| operation | ms | share |\n|---|---:|---:|")
        print(table(shares))


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user's is one sentence on stderr and the error's exit code."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.step_profile", description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--graph", default="guided_step", help="guided_step or plain_step")
    parser.add_argument("--runs", type=int, default=3)
    options: Any = parser.parse_args(argv)
    return exit_code(lambda: report(options.bundle, options.graph, max(1, options.runs)))


if __name__ == "__main__":
    sys.exit(main())
