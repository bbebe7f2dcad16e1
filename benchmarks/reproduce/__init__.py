"""The paper's tables and ablations over whatever data is present: `mdps reproduce`."""

from mdps.benchmarks.reproduce.run import ReproduceOptions, Reproduction, reproduce

__all__ = ["ReproduceOptions", "Reproduction", "reproduce"]
