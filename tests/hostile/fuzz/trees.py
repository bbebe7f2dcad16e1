"""Mutations of JSON values and of bytes; what JSON text can say and Python values cannot is a `Raw`."""

import copy
import json
from random import Random
from typing import Any


class Raw(str):
    """Text that is written into a JSON document as it stands."""

    __slots__ = ()


def odd_values(random: Random) -> list[Any]:
    """Values that readers tend to forget."""
    depth = random.choice([5, 60, 200, random.randrange(300, 1000), random.randrange(900, 1000), 50_000])
    return [
        *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**63, -(2**63), 10**20, 0.5, -0.5, 1e-320, 1e308),
        *(Raw("1" + "0" * 400), Raw("-" + "9" * 330), Raw("9" * 5000), Raw("1e400"), Raw("-0.0"), Raw("1E-400")),
        *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw('"\\ud800"'), Raw('"\\u0000"'), Raw('"\\'), Raw("")),
        *(
            "",
            "\0",
            "a" * 300,
            "b" * 5000,
            "..",
            "../x",
            "a/b",
            "/etc/passwd",
            "C:\\x",
            "C:x",
            "CON",
            "ü",
            "\N{PILE OF POO}",
        ),
        *("nan", "true", "0", "-1", "1,2", "1e999,2", "0x10", "1_0", "\n", " ", "{}", "%s%n", "$(id)"),
        *([], {}, [[]], [None], [0], [1, 2, 3], {"": None}, {"a": 1}, [1e400], [True], ["a"], [[1, 2], [3]]),
        *(Raw("[" * depth + "]" * depth), Raw('{"a":' * depth + "1" + "}" * depth)),
        *(Raw('{"a":1,"a":2}'), Raw("[1,]"), [random.getrandbits(64)], random.getrandbits(16), random.random()),
    ]


def mutated(tree: Any, random: Random) -> Any:
    """A copy with one to four changes."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        tree = _change(tree, random)
    return tree


def _change(tree: Any, random: Random) -> Any:
    spots = list(_spots(tree))
    if not spots or random.random() < 0.02:
        return random.choice(odd_values(random))
    holder, key = random.choice(spots)
    kind = random.random()
    if kind < 0.4:
        holder[key] = random.choice(odd_values(random))
    elif kind < 0.6:
        holder[key] = _nearby(holder[key], random)
    elif kind < 0.75:
        other, place = random.choice(spots)
        holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
    elif kind < 0.87:
        del holder[key]
    elif isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * random.choice([1, 2, 1000])
    else:
        name = random.choice(
            [key + "x", key.upper(), "", "\0", *holder, *(str(value) for value in odd_values(random)[:30])]
        )
        holder[name] = holder[key]
    return tree


def _spots(tree: Any) -> Any:
    """Every place in the tree, as its container and the key in it."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _spots(value)


def _nearby(value: Any, random: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = [value + 1, value - 1, -value, value * 2, value // 2, value * 1000, value ^ 1]
        return random.choice([*near, Raw(f"{value}.0"), str(value)])
    if isinstance(value, float):
        return random.choice([value * 2, -value, value + 1e-9, value / 3, Raw(f"{value:.0f}"), str(value)])
    if isinstance(value, str):
        return random.choice([value[:-1], value + "x", value.upper(), value + "\n", [value], value * 50])
    if isinstance(value, list):
        return random.choice([value[::-1], value * 2, value[:1], [value], value[:-1]])
    return [value]


def written(tree: Any, random: Random) -> bytes:
    """JSON text of a tree; a key now and then twice."""
    return _text(tree, random).encode("utf-8", "surrogatepass")


def _text(tree: Any, random: Random) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, dict):
        pairs = [f"{json.dumps(key)}: {_text(value, random)}" for key, value in tree.items()]
        if pairs and random.random() < 0.01:
            pairs.append(random.choice(pairs))
        return "{" + ", ".join(pairs) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ", ".join(_text(value, random) for value in tree) + "]"
    return json.dumps(tree)


def garbled(data: bytes, random: Random) -> bytes:
    """Bytes with one to four changes: cut, flipped, filled, doubled, moved."""
    for _ in range(random.choice([1, 1, 2, 4])):
        at = (
            min(int(random.expovariate(1 / 400)), len(data))
            if random.random() < 0.5
            else random.randrange(len(data) + 1)
        )
        size = random.choice([1, 2, 4, 8, 64])
        middle = {
            0: bytes(random.getrandbits(8) for _ in range(size)),
            1: bytes(size),
            2: b"\xff" * size,
            3: b"",
            4: data[at : at + size] * 2,
            5: (random.choice([0, 1, 127, 128, 255, 2**15, 2**31, 2**32 - 1])).to_bytes(
                4, random.choice(["little", "big"])
            ),
            6: bytes(byte ^ (1 << random.randrange(8)) for byte in data[at : at + size]),
        }[random.randrange(7)]
        data = data[:at] if random.random() < 0.15 else data[:at] + middle + data[at + size :]
    return data
