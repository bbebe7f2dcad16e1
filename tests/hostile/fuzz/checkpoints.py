"""Target `checkpoint`: what `load_denoiser` makes of torch files, safetensors, sidecars and diffusers folders."""

import collections
import contextlib
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch
import trees
from diffusers import UNet2DModel
from engine import Case
from safetensors.torch import save
from torch import Tensor

from mdps.models.checkpoints import CheckpointOptions, describe_checkpoint, load_denoiser, save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.errors import MdpsError
from mdps.runtime.schedule import NoiseSchedule

CONFIG = UNetConfig(
    8, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, attention_factors=(2,), num_heads=2, norm_groups=4
)
OPTIONS = CheckpointOptions(image_size=8, num_heads=2)
SIDECAR = {
    "network": {**CONFIG.to_json(), "attention_resolutions": [2], "dims": 2, "class_cond": False},
    "schedule": {"kind": "linear", "beta_start": 1e-4, "beta_end": 0.02, "steps": 100},
    "prediction": "eps",
}
DIFFUSERS: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "norm_eps": 1e-5,
    "time_embedding_dim": None,
}
SCHEDULER = {"beta_schedule": "linear", "num_train_timesteps": 100, "beta_start": 1e-4, "beta_end": 0.02}
ARGUMENTS = {"img_size": [8, 8], "num_heads": 2, "beta_schedule": "linear", "T": 100}


class _Runs:
    """Unpickling calls `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class Checkpoints:
    """Cases have the parts `name`, `content` and perhaps `sidecar`, `config`, `scheduler`."""

    refusals = (MdpsError,)

    def start(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._state = {key: value + 0.01 for key, value in UNet(CONFIG).state_dict().items()}
        with contextlib.suppress(Exception):  # what torch imports at its first use
            torch.save(self._state, folder / "warm.pt")
            describe_checkpoint(folder / "warm.pt")

    def seeds(self) -> list[Case]:
        state, buffer = self._state, Path(f"/tmp/mdps-fuzz-own-{os.getpid()}")
        network = UNet(CONFIG)
        network.load_state_dict(state)
        save_denoiser(buffer, network, NoiseSchedule.linear(100))
        own = buffer.read_bytes()
        buffer.unlink()
        sidecar, norms = json.dumps(SIDECAR).encode(), b'{"network": {"norm_groups": 4}}'
        lightning = {f"model.{key}": value for key, value in state.items()}
        theirs = dict(UNet2DModel(**DIFFUSERS).state_dict())
        folder = {
            "config": json.dumps(DIFFUSERS | {"_class_name": "UNet2DModel"}).encode(),
            "scheduler": json.dumps(SCHEDULER).encode(),
        }
        return [
            {"name": b"a.safetensors", "content": own},
            {"name": b"a.safetensors", "content": save(state), "sidecar": sidecar},
            {"name": b"a.pt", "content": _torch(state), "sidecar": sidecar},
            {"name": b"a.pt", "content": _torch(state, zipped=False), "sidecar": sidecar},
            {"name": b"a.pt", "content": _torch({"ema": state, "args": ARGUMENTS, "epoch": 3}), "sidecar": norms},
            {"name": b"a.pt", "content": _torch({"state_dict": lightning}), "sidecar": sidecar},
            {"name": b"diffusion_pytorch_model.safetensors", "content": save(theirs), **folder},
            {"name": b"diffusion_pytorch_model.bin", "content": _torch(theirs), **folder},
        ]

    def mutated(self, case: Case, random: Random) -> Case:
        parts = [name for name in ("sidecar", "config", "scheduler") if name in case]
        kind = random.random()
        if parts and kind < 0.3:
            part = random.choice(parts)
            return case | {part: _json_mutated(case[part], random)}
        if kind < 0.4:
            return case | {"content": trees.garbled(case["content"], random)}
        if kind < 0.65:
            return {"name": b"a.pt", "content": self._objects(random), "sidecar": json.dumps(SIDECAR).encode()}
        if case["name"].endswith(b"safetensors"):
            return case | {"content": _safetensors_mutated(case["content"], random)}
        return case | {"content": _archive_mutated(case["content"], random)}

    def run(self, case: Case, folder: Path) -> None:
        place = folder / "case"
        place.mkdir(exist_ok=True)
        for file in place.iterdir():
            file.unlink()
        path = place / case["name"].decode()
        path.write_bytes(case["content"])
        for part, name in (
            ("config", "config.json"),
            ("scheduler", "scheduler_config.json"),
            ("sidecar", path.name + ".json"),
        ):
            if part in case:
                (place / name).write_bytes(case[part])
        whole = place if "config" in case else path
        str(describe_checkpoint(whole))
        denoiser = load_denoiser(whole, None if "config" in case or "sidecar" in case else OPTIONS)
        assert all(value.is_contiguous() or value.numel() for value in denoiser.network.state_dict().values())

    def _objects(self, random: Random) -> bytes:
        """A file of a state dict to which odd things happened."""
        state: Any = dict(self._state)
        for _ in range(random.choice([1, 1, 2, 5])):
            state = _odd_state(state, random)
        with contextlib.suppress(Exception):
            return _torch(state, zipped=random.random() < 0.7, protocol=random.choice([2, 2, 2, 4]))
        return _torch({})


def _torch(obj: Any, *, zipped: bool = True, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return buffer.getvalue()


def _json_mutated(text: bytes, random: Random) -> bytes:
    if random.random() < 0.15:
        return trees.garbled(text, random)
    try:
        return trees.written(trees.mutated(json.loads(text), random), random)
    except (ValueError, RecursionError):
        return trees.garbled(text, random)


def _odd_state(state: Any, random: Random) -> Any:
    if not isinstance(state, dict) or not state:
        return state
    key = random.choice(list(state))
    kind = random.randrange(9)
    if kind == 0:
        name = random.choice(["model", "ema", "state_dict", "args", "x", "module", "unet"])
        return {name: state, **random.choice([{}, {"args": _arguments(random)}, {"epoch": 1}])}
    if kind == 1:
        return {
            random.choice(["model.", "module.", "_orig_mod.", "ema.", "a.b.", "."]) + str(k): v
            for k, v in state.items()
        }
    if kind == 2:
        return {name: value for name, value in state.items() if name != key}
    if kind == 3:
        return _nested(state, random)
    if kind == 4:
        return {name: _odd_tensor(value, random) if random.random() < 0.3 else value for name, value in state.items()}
    if kind == 5:
        number = random.choice(["99999", "9" * 20, "9" * 5000, "-1", "\N{ARABIC-INDIC DIGIT THREE}", "00", "1e3", "7"])
        odd = random.choice(
            ["input_blocks.{}.0.in_layers.2.weight", "output_blocks.{}.1.conv.weight", "output_blocks.{}.x"]
        )
        return state | {odd.format(number): torch.zeros(3)}
    if kind == 6:
        return state | {random.choice([1, None, (1, 2), 1.5, b"x", True, "", "\0", "x" * 3000]): state[key]}
    if kind == 7:
        return state | {key: _odd_value(random)}
    return state | {key: _odd_tensor(state[key], random)}


def _arguments(random: Random) -> Any:
    arguments: Any = dict(ARGUMENTS)
    name = random.choice(list(arguments))
    odd = [_odd_value(random), 0, -1, 10**12, 10**400, 1e999, float("nan"), True, "x", [8, 9], [], {}, None, "cosine"]
    return random.choice([arguments | {name: random.choice(odd)}, collections.defaultdict(str, arguments), 3, []])


def _nested(state: dict[Any, Any], random: Random) -> Any:
    name = random.choice(["model", "state_dict", "x"])
    if random.random() < 0.3:
        state = {**state}
        state[name] = state  # holds itself
        return state
    if random.random() < 0.3:
        empty: dict[str, Any] = {}
        for _ in range(random.choice([3, 12, 40])):  # each level holds the one below six times
            empty = dict.fromkeys(("ema", "model", "network", "unet", "params", "state_dict"), empty)
        return empty
    for _ in range(random.choice([2, 20, 200])):
        state = {name: state}
    return state


def _odd_value(random: Random) -> Any:
    values: list[Any] = [
        None,
        1,
        10**400,
        "x",
        b"x",
        [],
        {},
        (),
        set(),
        {"a": 1},
        [torch.zeros(2)],
        1.5,
        1j,
        frozenset(),
    ]
    values += [
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cpu"),
        collections.OrderedDict(),
        collections.Counter("a"),
    ]
    values += [_Runs(os.mkdir, "/tmp/mdps-fuzz-hole"), _Runs(os.system, "true"), _Runs(eval, "1+1"), _Runs(print, "x")]
    values += [_Runs(torch.Tensor, 3), _Runs(torch.load, "x"), _Runs(getattr, torch, "save"), _Runs(bytearray, 10**12)]
    values += [_Runs(torch.Size, [10**12]), _Runs(collections.Counter, "x" * 1000), UNetConfig(8), Path("/etc")]
    return random.choice(values)


def _odd_tensor(value: Any, random: Random) -> Any:
    # One that an earlier change made huge without memory would take hours to write out.
    if not isinstance(value, Tensor) or value.numel() > 10**6:
        return _odd_value(random)
    big = random.choice([0, 1, 7, 10**6, 10**9, 2**40])
    makes = [
        lambda: value.to(
            random.choice([torch.half, torch.bfloat16, torch.double, torch.int8, torch.bool, torch.complex64])
        ),
        lambda: torch.empty(value.shape, device="meta"),
        lambda: value.to_sparse(),
        lambda: value.reshape(-1)[:1].expand(max(1, value.numel())).reshape(value.shape),
        lambda: torch.zeros(1).as_strided((big, *value.shape[1:]), (0,) * max(1, value.dim())),
        lambda: torch.zeros(1, dtype=torch.half).as_strided((big, big), (0, 0)),
        lambda: torch.zeros([0 if n == random.randrange(4) else side for n, side in enumerate(value.shape)]),
        lambda: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        lambda: value * random.choice([float("nan"), float("inf"), 1e38, 0.0]),
        lambda: torch.nn.Parameter(value),
        lambda: value.transpose(0, -1) if value.dim() else value,
        lambda: value.unsqueeze(0),
        lambda: value.repeat(*[2] * value.dim()) if value.dim() else value,
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.zeros((), dtype=value.dtype),
        lambda: torch.view_as_complex(torch.zeros(4, 2)).conj(),
        lambda: torch._neg_view(value),
    ]
    with contextlib.suppress(Exception):
        return random.choice(makes)()
    return _odd_value(random)


def _archive_mutated(data: bytes, random: Random) -> bytes:
    """The records of a torch archive changed one by one and zipped again, as torch or with a squeeze."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError, struct.error):
        return trees.garbled(data, random)
    for _ in range(random.choice([1, 1, 2])):
        if records:
            name = random.choice([*records, *[n for n in records if n.endswith(".pkl")] * 8])
            records = _record_mutated(records, name, random)
    buffer = io.BytesIO()
    squeeze = zipfile.ZIP_DEFLATED if random.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", squeeze) as archive:
        for name, content in records.items():
            archive.writestr(name or "x", content)
    whole = buffer.getvalue()
    return trees.garbled(whole, random) if random.random() < 0.1 else whole


def _record_mutated(records: dict[str, bytes], name: str, random: Random) -> dict[str, bytes]:
    content = records[name]
    if name.endswith(".pkl"):
        return records | {name: _pickle_mutated(content, random)}
    kind = random.randrange(6)
    if kind == 0:
        return {other: value for other, value in records.items() if other != name}
    if kind == 1:
        return records | {random.choice(["../" + name, "/" + name, name + "x", name.upper(), "constants.pkl"]): content}
    if kind == 2:
        return records | {name: bytes(random.choice([0, 1, 2**24]))}
    return records | {
        name: content[: random.randrange(len(content) + 1)] if kind == 3 else trees.garbled(content, random)
    }


# Names that torch's reader lets through: what could be done with them alone.
_LET_THROUGH = [f"{module}\n{name}\n".encode() for module, name in (
    *(("torch._utils", name) for name in (
        "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_sparse_tensor",
        "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_qtensor", "_rebuild_wrapper_subclass",
        "_rebuild_parameter_with_state", "_rebuild_device_tensor_from_numpy",
    )),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("collections", "Counter"), ("torch", "Size"),
    ("torch", "Tensor"), ("torch", "FloatStorage"), ("torch", "device"), ("torch.nn.parameter", "Parameter"),
    ("torch", "storage"), ("builtins", "str"), ("builtins", "bytearray"), ("builtins", "set"), ("builtins", "complex"),
    ("_codecs", "encode"), ("torch.serialization", "_get_layout"), ("os", "system"), ("builtins", "eval"),
    ("torch.storage", "_load_from_bytes"), ("numpy._core.multiarray", "_reconstruct"), ("torch.jit", "load"),
)]  # fmt: skip
_PIECES = [
    b")",
    b"}",
    b"]",
    b"(",
    b"t",
    b"R",
    b"s",
    b"u",
    b"a",
    b"e",
    b"b",
    b"Q",
    b"0",
    b"N",
    b"K\x01",
    b"q\x01",
    b"h\x01",
]
_PIECES += [
    b"\x81",
    b"\x85",
    b"\x86",
    b"\x87",
    b"\x88",
    b"J\xff\xff\xff\xff",
    b"j\xff\xff\xff\x7f",
    b"r\xff\xff\xff\xff",
]
_PIECES += [
    b"X\x05\x00\x00\x00model",
    b"X\xff\xff\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"M\xff\xff",
    b".",
]
_PIECES += [
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"B\xff\xff\xff\x7f",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x95" + bytes(8),
]


def _pickle_mutated(data: bytes, random: Random) -> bytes:
    kind = random.random()
    if kind < 0.3:
        return trees.garbled(data, random)
    if kind < 0.5:  # a number of elements, a stride or an offset changed, which a reader may believe
        spots = [n for n, byte in enumerate(data) if byte in b"KM"]
        if spots:
            at = random.choice(spots)
            size = 2 if data[at : at + 1] == b"K" else 3
            number = random.choice([0, 1, 255, 2**16, 2**20, 2**30, 2**31 - 1, 2**32 + 3, 2**40, 2**62, -1])
            return data[:at] + b"\x8a\x08" + struct.pack("<q", number) + data[at + size :]
    if kind < 0.75:
        call = b"c" + random.choice(_LET_THROUGH) + b"".join(random.choice(_PIECES) for _ in range(random.randrange(8)))
        return b"\x80\x02" + call + random.choice([b"R.", b"\x85R.", b")R.", b"b.", b"."])
    at = random.randrange(2, len(data) + 1) if len(data) > 2 else 0
    pieces = [*_PIECES, *(b"c" + name for name in _LET_THROUGH)]
    return data[:at] + b"".join(random.choice(pieces) for _ in range(random.randrange(1, 5))) + data[at:]


def _safetensors_mutated(data: bytes, random: Random) -> bytes:
    if len(data) < 8:
        return trees.garbled(data, random)
    size = int.from_bytes(data[:8], "little")
    head, rest = data[8 : 8 + size], data[8 + size :]
    kind = random.random()
    if kind < 0.15:
        length = random.choice([0, 1, size - 1, size + 1, len(data), 10**8, 2**31, 2**63, 2**64 - 1])
        return length.to_bytes(8, "little") + data[8:]
    try:
        tree = json.loads(head)
    except (ValueError, RecursionError):
        return trees.garbled(data, random)
    entries = [value for name, value in tree.items() if name != "__metadata__"] if isinstance(tree, dict) else []
    entries = [value for value in entries if isinstance(value, dict)]
    if entries and kind < 0.35:
        random.choice(entries)["dtype"] = random.choice(
            [
                "F64",
                "F16",
                "BF16",
                "I8",
                "U8",
                "BOOL",
                "C64",
                "F8_E4M3",
                "F8_E5M2",
                "F8_E8M0",
                "F4",
                "F6_E2M3",
                "U64",
                "x",
                "",
            ]
        )
    elif entries and kind < 0.55:
        shape = random.choice(entries).get("shape")
        if isinstance(shape, list):
            shape[:] = random.choice(
                [[], [0], [2**63, 2], [2**32, 2**32], [1] * 100, shape[::-1], [*shape, 1], [-1], [1.5]]
            )
    elif isinstance(tree, dict) and isinstance(tree.get("__metadata__"), dict) and kind < 0.8:
        meta = tree["__metadata__"]
        for name in list(meta):
            with contextlib.suppress(ValueError, RecursionError, TypeError):
                meta[name] = trees.written(trees.mutated(json.loads(meta[name]), random), random).decode(
                    "utf-8", "replace"
                )
    else:
        tree = trees.mutated(tree, random)
    text = trees.written(tree, random)
    return len(text).to_bytes(8, "little") + text + rest


assert pickle.DEFAULT_PROTOCOL >= 4
