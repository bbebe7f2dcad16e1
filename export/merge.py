"""Several ONNX graphs into one: nodes added by name, whole graphs spliced in, equal constants stored once."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper


@dataclass
class Merger:
    """Collects nodes in the order they run, and initializers by content, so that copies of a graph share weights."""

    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    _constants: dict[str, str] = field(default_factory=dict)
    _counter: Iterator[int] = field(default_factory=lambda: count(1))

    def inside(self, *, own_constants: bool) -> "Merger":
        """Return a merger for the body of a loop: other nodes, no name twice; constants of its own, or this one's."""
        if own_constants:
            return Merger(_counter=self._counter)
        return Merger([], self.initializers, self._constants, self._counter)

    def loop(self, trips: str, carried: Sequence[str], write: "WriteBody", *, own_constants: bool) -> list[str]:
        """Add a Loop over float32 `carried` values; `write(body, index, carried)` returns the names of the next."""
        body = self.inside(own_constants=own_constants)
        index, condition, *current = (self._fresh(stem) for stem in ("index", "condition", *carried))
        following = write(body, index, current)
        outputs = [body("Identity", name) for name in (condition, *following)]  # a body must not hand out an input
        floats = [TensorProto.FLOAT] * len(carried)
        graph = helper.make_graph(
            body.nodes,
            self._fresh("body"),
            _values([index, condition, *current], [TensorProto.INT64, TensorProto.BOOL, *floats]),
            _values(outputs, [TensorProto.BOOL, *floats]),
            body.initializers if own_constants else [],
        )
        results = [self._fresh("Loop") for _ in carried]
        always = self.scalar(True, np.bool_)
        self.nodes.append(helper.make_node("Loop", [trips, always, *carried], results, name=results[0], body=graph))
        return results

    def __call__(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node of one output, called `name` or numbered, and return that output's name."""
        output = name or self._fresh(op)
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def constant(self, value: NDArray[Any]) -> str:
        """Name of an initializer with this dtype, shape and content; one already there is shared."""
        return self._share(numpy_helper.from_array(value.copy(order="C")))

    def scalar(self, value: float, dtype: Any) -> str:
        """Return `constant` of shape []."""
        return self.constant(np.asarray(value, dtype=dtype))

    def shape(self, *lengths: int) -> str:
        """Return `constant` int64 [n]: a shape, axes, or bounds of a slice."""
        return self.constant(np.asarray(lengths, dtype=np.int64))

    def splice(self, graph: GraphProto, feeds: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
        """Append `graph` with its inputs taken from `feeds` {input: name}; the names its `wanted` outputs got here.

        What no wanted output needs is left out. Feeds the graph has no input for are ignored.
        """
        prefix = self._fresh("graph")
        names = {tensor.name: self._share(tensor) for tensor in graph.initializer}
        names |= {value.name: feeds[value.name] for value in graph.input if value.name not in names}
        outputs = list(wanted)
        for node in _needed(graph, outputs):
            names |= {output: f"{prefix}/{output}" for output in node.output if output}
            self.nodes.append(_renamed(node, names, prefix))
        return {output: names[output] for output in outputs}

    def _share(self, tensor: TensorProto) -> str:
        array = numpy_helper.to_array(tensor)
        content = hashlib.sha256(array.tobytes()).hexdigest()
        key = f"{tensor.data_type} {array.shape} {content}"
        if key not in self._constants:
            kept = numpy_helper.from_array(array, self._fresh("constant"))
            self._constants[key] = kept.name
            self.initializers.append(kept)
        return self._constants[key]

    def _fresh(self, stem: str) -> str:
        return f"{stem}_{next(self._counter)}"


WriteBody = Callable[[Merger, str, list[str]], list[str]]


def _values(names: Iterable[str], types: Iterable[int]) -> list[ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, kind, [] if kind in (TensorProto.INT64, TensorProto.BOOL) else None)
        for name, kind in zip(names, types, strict=True)
    ]


def _needed(graph: GraphProto, outputs: Iterable[str]) -> list[NodeProto]:
    """Return the nodes on which `outputs` depend, in the graph's order."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(_reads(node))
            nodes.append(node)
    return nodes[::-1]


def _reads(node: NodeProto) -> set[str]:
    """Return the names a node takes, those its subgraphs take from around them included."""
    inner = (reads for graph in _subgraphs(node) for part in graph.node for reads in _reads(part))
    return {*node.input, *inner, *(value.name for graph in _subgraphs(node) for value in graph.output)}


def _subgraphs(node: NodeProto) -> list[GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def _renamed(node: NodeProto, names: Mapping[str, str], prefix: str) -> NodeProto:
    """Return a copy under other names; a subgraph's own names stay, since no other graph sees them."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{prefix}/{node.name}" if node.name else ""
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for graph in _subgraphs(copy):
        for part in list(graph.node):
            part.CopyFrom(_renamed(part, names, prefix))
    return copy
