"""Fixtures shared by all tests."""

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with golden numbers and real data: `MDPS_SHARED`, or `shared` beside the checkout."""
    folder = Path(os.environ.get("MDPS_SHARED", ROOT.parent / "shared"))
    if not (folder / "golden").is_dir():
        reason = "no shared folder: set MDPS_SHARED to the folder that holds golden/ and data/"
        if os.environ.get("MDPS_CI"):  # a run that decides must not pass because its proof was missing
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def _formula_array(key: str, shape: Sequence[int]) -> NDArray[np.float32]:
    z = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return z / np.float32(math.sqrt(math.prod(shape[1:])))
    return np.float32(1) + np.float32(0.1) * z if key.endswith("weight") else np.float32(0.05) * z


@pytest.fixture(scope="session")
def formula_weights() -> Callable[[Mapping[str, Sequence[int]]], dict[str, NDArray[np.float32]]]:
    """Weights by the formula of the golden numbers: {key without "module.": shape} -> {key: float32 array}."""
    return lambda shapes: {key: _formula_array(key, shape) for key, shape in shapes.items()}


@pytest.fixture(scope="session")
def small_weights(formula_weights: Callable[..., dict[str, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    """State dict (authors' keys, no prefix) of the 32 x 32 network that made tests/data/small.npz."""
    layout = json.loads((ROOT / "tests" / "data" / "authors.json").read_text(encoding="utf-8"))
    weights = formula_weights(layout["state_dict"])
    return weights | {"out.2.weight": weights["out.2.weight"] * np.float32(0.3)}


@pytest.fixture(scope="session")
def small() -> Mapping[str, NDArray[np.float32]]:
    """Golden arrays of both modes at 32 x 32 (tests/data/small.npz)."""
    with np.load(ROOT / "tests" / "data" / "small.npz") as arrays:
        return dict(arrays)
