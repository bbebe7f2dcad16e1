"""The Open Inference Protocol's tensors: JSON and the binary extension, in and out.

https://github.com/kserve/open-inference-protocol, with the binary data extension of Triton's HTTP protocol.
"""

import base64
import binascii
import json
import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.runtime.detector import Result
from mdps.serving.http.bodies import check_pixels, open_image
from mdps.serving.http.refusals import bad_request

INPUT = "image"
_MAX_ID = 256  # characters
_MOST_OBJECTS, _MOST_KEYS = 100, 1000


@dataclass(frozen=True)
class Wanted:
    """An output that was asked for, as binary data or as JSON."""

    name: str
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """A client's request: a picture, the outputs it wants, the id to give back, its own deadline in seconds.

    `batched` is whether the tensor had a leading axis of 1, which the map then has too.
    """

    picture: Image.Image | NDArray[np.uint8]
    batched: bool
    wanted: tuple[Wanted, ...]
    id: str | None
    timeout: float | None


def output_names(calibrated: bool) -> tuple[str, ...]:
    """Return the names of a model's outputs; without a calibration there is neither a threshold nor a verdict."""
    return ("score", "threshold", "verdict", "anomaly_map") if calibrated else ("score", "anomaly_map")


def metadata(calibrated: bool) -> dict[str, Any]:
    """Inputs and outputs in the protocol's form."""
    kinds = {
        "score": ("FP32", [1]),
        "threshold": ("FP32", [1]),
        "verdict": ("BYTES", [1]),
        "anomaly_map": ("FP32", [-1, -1]),
    }
    outputs = [{"name": n, "datatype": kinds[n][0], "shape": kinds[n][1]} for n in output_names(calibrated)]
    return {"inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, -1, 3]}], "outputs": outputs}


def parse(body: bytes, header_length: str | None, *, max_pixels: int, outputs: Sequence[str]) -> InferRequest:
    """A request from its body; Refusal 400 or 413 with what is wrong. Not for the event loop: a body can be large."""
    head, binary = _split(body, header_length)
    message = _object(_json(head), "the request")
    parameters = _object(message.get("parameters", {}), "parameters")
    inputs = message.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1:
        raise bad_request(f"inputs should be a list of one tensor, {INPUT!r}")
    picture, batched = _picture(_object(inputs[0], "the input"), binary, max_pixels)
    return InferRequest(
        picture, batched, _wanted(message, parameters, outputs), _id(message), _timeout(parameters.get("timeout"))
    )


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes | None]:
    if header_length is None:
        return body, None
    if not (header_length.isascii() and header_length.isdigit()) or len(header_length) > 12:
        raise bad_request("Inference-Header-Content-Length should be a number of bytes")
    length = int(header_length)
    if not 0 < length <= len(body):
        raise bad_request(f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes")
    return body[:length], body[length:]


def _json(text: bytes) -> Any:
    lists, commas = text.count(b"["), text.count(b",")
    # Made of these, 16 MB of text become a gigabyte of objects. A picture's nested lists hold two numbers or more each.
    if text.count(b"{") > _MOST_OBJECTS or text.count(b":") > _MOST_KEYS or 3 * lists > 2 * commas + _MOST_KEYS:
        raise bad_request("the JSON has more objects, keys or empty lists than any request of the protocol")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the JSON is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is no JSON: {str(error)[:200]}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number JSON has")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{what} should be an object")
    return value


def _shown(value: Any) -> str:
    """A client's value in a sentence: short, however large or deep it is."""
    return reprlib.repr(value)


def _id(message: Mapping[str, Any]) -> str | None:
    name = message.get("id")
    if name is not None and (not isinstance(name, str) or len(name) > _MAX_ID):
        raise bad_request(f"id should be a text of at most {_MAX_ID} characters")
    return name


def _timeout(microseconds: Any) -> float | None:
    if microseconds is None:
        return None
    if not _is_count(microseconds):
        raise bad_request("the parameter timeout should be a number of microseconds")
    return float(microseconds) / 1e6 or None  # Triton's clients send 0 for none


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _wanted(message: Mapping[str, Any], parameters: Mapping[str, Any], known: Sequence[str]) -> tuple[Wanted, ...]:
    all_binary = _flag(parameters, "binary_data_output")
    asked = message.get("outputs")
    if asked is None:
        return tuple(Wanted(name, all_binary) for name in known)
    if not isinstance(asked, list) or not asked or len(asked) > len(known):
        raise bad_request(f"outputs should be a list of some of {', '.join(known)}")
    wanted = [_one_wanted(_object(output, "an output"), known, all_binary) for output in asked]
    if len({output.name for output in wanted}) < len(wanted):
        raise bad_request("an output is asked for twice")
    return tuple(wanted)


def _one_wanted(output: Mapping[str, Any], known: Sequence[str], all_binary: bool) -> Wanted:
    name, parameters = output.get("name"), _object(output.get("parameters", {}), "an output's parameters")
    if name not in known:
        raise bad_request(f"there is no output {_shown(name)}: ask for {', '.join(known)}")
    for unknown in ("classification", "shared_memory_region"):
        if unknown in parameters:
            raise bad_request(f"the output parameter {unknown} is not supported")
    return Wanted(str(name), _flag(parameters, "binary_data", all_binary))


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise bad_request(f"the parameter {name} should be true or false")
    return value


def _picture(
    tensor: Mapping[str, Any], binary: bytes | None, max_pixels: int
) -> tuple[Image.Image | NDArray[np.uint8], bool]:
    if tensor.get("name") != INPUT:
        raise bad_request(f"there is no input {_shown(tensor.get('name'))}: the one input is {INPUT!r}")
    shape, datatype = _shape(tensor.get("shape")), tensor.get("datatype")
    data = _data(tensor, binary)
    if datatype == "BYTES":
        if math.prod(shape) != 1:
            raise bad_request(f"{INPUT!r} as BYTES should be one encoded file, of shape [1]")
        return open_image(_one_file(data), max_pixels), len(shape) > 1
    if datatype != "UINT8":
        raise bad_request(f"{INPUT!r} should be UINT8 levels 0 to 255, or BYTES of an encoded file")
    batched = len(shape) == 4
    if not (len(shape) == 3 or (batched and shape[0] == 1)) or shape[-1] != 3:
        raise bad_request(
            f"{INPUT!r} as UINT8 should be [H, W, 3] or [1, H, W, 3], not {shape}: send one image a request"
        )
    height, width = shape[-3:-1]
    check_pixels((width, height), max_pixels)
    return _levels(data, height * width * 3).reshape(height, width, 3), batched


def _shape(shape: Any) -> list[int]:
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(_is_count(n) and n for n in shape):
        raise bad_request("an input's shape should be a list of one to four positive numbers")
    return shape


def _data(tensor: Mapping[str, Any], binary: bytes | None) -> Any:
    """The list of a JSON tensor, or the bytes of a binary one."""
    parameters = _object(tensor.get("parameters", {}), "an input's parameters")
    if "shared_memory_region" in parameters:
        raise bad_request("shared memory is not supported")
    size = parameters.get("binary_data_size")
    if size is None:
        if binary:
            raise bad_request("the body goes on after the JSON, and no input has a binary_data_size")
        if not isinstance(tensor.get("data"), list):
            raise bad_request("the input should have its data as a list")
        return tensor["data"]
    if "data" in tensor:
        raise bad_request("the input has both data and a binary_data_size")
    if binary is None:
        raise bad_request("binary data needs the header Inference-Header-Content-Length")
    if not _is_count(size) or size != len(binary):
        raise bad_request(f"binary_data_size is {_shown(size)}, and {len(binary)} bytes follow the JSON")
    return binary


def _one_file(data: Any) -> bytes:
    if isinstance(data, bytes):
        if len(data) < 4 or struct.unpack_from("<I", data)[0] != len(data) - 4:
            raise bad_request("binary BYTES should be a length of 4 bytes (little-endian) and so many bytes")
        return data[4:]
    if len(data) != 1 or not isinstance(data[0], str):
        raise bad_request("BYTES in JSON should be one text, the file in base64")
    try:
        return base64.b64decode(data[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"the BYTES are no base64: {error}") from error


def _levels(data: Any, count: int) -> NDArray[np.uint8]:
    """uint8 [count] from bytes, or from a flat or nested list of whole numbers."""
    if isinstance(data, bytes):
        if len(data) != count:
            raise bad_request(f"the shape needs {count} bytes, and there are {len(data)}")
        return np.frombuffer(data, np.uint8)
    while data and all(type(item) is list for item in data):
        if len({len(item) for item in data}) > 1:
            raise bad_request("the data should be a flat or evenly nested list of whole numbers")
        data = list(chain.from_iterable(data))
    # numpy would make texts of all numbers where one is a text, each as long as the longest.
    if len(data) != count or not all(type(item) is int for item in data):
        raise bad_request(f"the data should be {count} whole numbers, it is {len(data)} values or not all are numbers")
    try:
        return np.frombuffer(bytes(data), np.uint8)
    except ValueError as error:
        raise bad_request("UINT8 levels lie between 0 and 255") from error


def answer(
    model: str, version: str, request: InferRequest, result: Result, parameters: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """The response's body, and the length of its JSON where binary data follows it."""
    described, binary = [], b""
    for wanted in request.wanted:
        values, datatype = _output(wanted.name, result, request.batched)
        entry: dict[str, Any] = {"name": wanted.name, "datatype": datatype, "shape": list(values.shape)}
        if wanted.binary:
            raw = _raw(values)
            entry["parameters"] = {"binary_data_size": len(raw)}
            binary += raw
        else:
            entry["data"] = values.reshape(-1).tolist()
        described.append(entry)
    message: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        message["id"] = request.id
    message |= {"parameters": dict(parameters), "outputs": described}
    head = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    is_binary = any(wanted.binary for wanted in request.wanted)
    return head + binary, len(head) if is_binary else None


def _output(name: str, result: Result, batched: bool) -> tuple[NDArray[Any], str]:
    if name == "anomaly_map":
        return (result.anomaly_map[None] if batched else result.anomaly_map), "FP32"
    if name == "verdict":
        return np.array([result.verdict], dtype=object), "BYTES"
    return np.array([getattr(result, name)], np.float32), "FP32"


def _raw(values: NDArray[Any]) -> bytes:
    if values.dtype == object:
        return b"".join(struct.pack("<I", len(text)) + text for text in (str(v).encode() for v in values.reshape(-1)))
    return np.ascontiguousarray(values, dtype="<f4").tobytes()
