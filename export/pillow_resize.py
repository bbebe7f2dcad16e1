"""Pillow's antialiased bilinear resize as standard ONNX nodes, equal to it to the last bit.

ONNX has a Resize with `antialias`, but ONNX Runtime computes its coefficients in single precision and rounds one pixel
in a thousand to the next level, which moves a map by more than any other part does. Here the coefficients are Pillow's:
double precision rounded to 22 bits, every sum exact in integers, and uint8 between the two passes. The horizontal pass
comes first, as in every Pillow to 12; Pillow 13 begins with the vertical one where that is cheaper, which may change
pixels by a level.
"""

import numpy as np
from onnx import TensorProto

from mdps.export.merge import Merger

PRECISION_BITS = 22  # of Pillow's fixed-point coefficients for 8-bit pictures


def resize(add: Merger, image: str, height: int, width: int) -> str:
    """Resize uint8 [H, W, 3] of any size to uint8 [height, width, 3]: the horizontal pass first, then the vertical."""
    lines = add("Reshape", image, add.shape(0, -1))
    # Matrices throughout: engines move the bytes of a transposed matrix fast, and those of [H, W, 3] slowly.
    columns = _shrink(add, add("Reshape", add("Transpose", lines, perm=[1, 0]), _tail(add, image)), width)
    upright = add("Transpose", add("Reshape", columns, add.shape(3 * width, -1)), perm=[1, 0])
    return add("Reshape", _shrink(add, upright, height), add.shape(height, width, 3))


def _tail(add: Merger, image: str) -> str:
    """Return the shape [W, -1]."""
    return add("Concat", add("Gather", add("Shape", image), add.shape(1)), add.shape(-1), axis=0)


def _shrink(add: Merger, matrix: str, size: int) -> str:
    """Resize along the first axis: uint8 [L, M] to uint8 [size, M]."""
    taps, coefficients = _taps(add, add("Gather", add("Shape", matrix), add.shape(0)), size)
    sums = add("MatMulInteger", coefficients, add("Gather", matrix, taps))  # int32 [size, 3, M]
    high, middle, low = (add("Gather", sums, add.scalar(i, np.int64), axis=1) for i in range(3))
    total = add("Add", _scaled(add, add("Add", _scaled(add, high), middle)), low)
    rounded = add("Add", total, add.scalar(1 << (PRECISION_BITS - 1), np.int32))
    levels = add("Div", rounded, add.scalar(1 << PRECISION_BITS, np.int32))
    return add("Cast", add("Min", levels, add.scalar(255, np.int32)), to=TensorProto.UINT8)


def _scaled(add: Merger, sums: str) -> str:
    return add("Mul", sums, add.scalar(256, np.int32))


def _taps(add: Merger, rows: str, size: int) -> tuple[str, str]:
    """Return (int64 [size, K] rows of an output row, uint8 [size, 3, K] their coefficients as bytes, highest first)."""
    length = add("Cast", rows, to=TensorProto.DOUBLE)  # [1]
    scale = add("Div", length, _number(add, size))
    support = add("Max", scale, _number(add, 1))
    center = add("Mul", add.constant(np.arange(size, dtype=np.float64).reshape(-1, 1) + 0.5), scale)
    start = add("Floor", add("Add", add("Sub", center, support), _number(add, 0.5)))
    count = add("Add", add("Mul", add("Ceil", support), _number(add, 2)), _number(add, 1))
    steps = add("Range", _number(add, 0), add("Squeeze", count), _number(add, 1))
    index = add("Add", add("Max", start, _number(add, 0)), steps)  # [size, K]; beyond the last row it weighs nothing
    offset = add("Add", add("Sub", index, center), _number(add, 0.5))
    distance = add("Abs", add("Mul", offset, add("Div", _number(add, 1), support)))
    triangle = add("Max", add("Sub", _number(add, 1), distance), _number(add, 0))
    weight = add("Where", add("Less", index, length), triangle, _number(add, 0))
    share = add("Div", weight, add("ReduceSum", weight, add.shape(1), keepdims=1))
    whole = add("Floor", add("Add", add("Mul", share, _number(add, 1 << PRECISION_BITS)), _number(add, 0.5)))
    inside = add("Min", index, add("Sub", length, _number(add, 1)))
    return add("Cast", inside, to=TensorProto.INT64), _bytes(add, whole)


def _bytes(add: Merger, whole: str) -> str:
    """Split whole numbers below 2^24, double [size, K], as uint8 [size, 3, K]."""
    high = add("Floor", add("Mul", whole, _number(add, 2.0**-16)))
    rest = add("Sub", whole, add("Mul", high, _number(add, 2.0**16)))
    middle = add("Floor", add("Mul", rest, _number(add, 2.0**-8)))
    low = add("Sub", rest, add("Mul", middle, _number(add, 2.0**8)))
    parts = [add("Unsqueeze", part, add.shape(1)) for part in (high, middle, low)]
    return add("Cast", add("Concat", *parts, axis=1), to=TensorProto.UINT8)


def _number(add: Merger, value: float) -> str:
    return add.scalar(value, np.float64)
