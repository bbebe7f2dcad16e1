"""An engine of your own, as a row in the table: `python own_engine.py bundle part.png` judges by onnx's evaluator."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from onnx.reference import ReferenceEvaluator

from mdps.runtime import LoadOptions, MdpsError, engines, load
from mdps.runtime.engines.interface import Check, GraphFile
from mdps.runtime.session import Arrays, CopyingRun


class Evaluated:
    """One graph: named arrays in, named arrays out. `mdps.runtime.session.Session` says what each member must do."""

    provider = "onnx.reference"

    def __init__(self, graph: GraphFile) -> None:
        self._evaluator = ReferenceEvaluator(str(graph.file))
        self.inputs, self.outputs = tuple(self._evaluator.input_names), tuple(self._evaluator.output_names)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> Arrays:
        names = list(outputs or self.outputs)
        return dict(zip(names, self._evaluator.run(names, dict(feeds)), strict=True))

    def bind(self, feeds: Mapping[str, Any]) -> CopyingRun:
        return CopyingRun(self, feeds)

    def close(self) -> None:
        del self._evaluator


def open(engine: engines.Engine, graph: GraphFile, options: LoadOptions) -> Evaluated:
    return Evaluated(graph)


def probe(engine: engines.Engine) -> Check:
    return Check(engine.name, usable=True)


engines.ENGINES += (engines.Engine("evaluator", "onnx's evaluator", __name__, "onnx", ("onnx",), "export"),)

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python own_engine.py BUNDLE IMAGE")
    try:
        with load(sys.argv[1], engine="evaluator") as detector:
            result = detector(sys.argv[2])
    except MdpsError as error:
        sys.exit(str(error))
    print(f"{result.verdict}, score {result.score:.4f}, by {detector.provenance['engines']}")
