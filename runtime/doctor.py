"""Finds out what really works here: each engine is tried, not believed."""

import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mdps.runtime import engines
from mdps.runtime.cards import Card, cards
from mdps.runtime.demo import PICTURES, VERDICTS, demo_detector, demo_picture
from mdps.runtime.engines import DEFAULT, Engine, clash, named, wheels
from mdps.runtime.engines.interface import Check, module_of
from mdps.runtime.errors import MdpsError
from mdps.runtime.machine import available_cpus, cpus_limited_by, installed

_BEFORE = ("mdps", "numpy", "pillow")
_AFTER = ("opencv-python-headless", "cuda-bindings", "timm", "onnx", "onnxscript", "onnxslim")


@dataclass(frozen=True)
class Diagnosis:
    """The report of `mdps doctor`. `problems` are sentences with what to do.

    `cpus_limited_by` names what makes `cpus` fewer than `cpus_of_host`; None where they are all used. `demo` are the
    verdicts of the detector in the package on its own pictures; None where it was not asked.
    """

    python: str
    system: str
    cpus: int
    cpus_of_host: int
    cpus_limited_by: str | None
    cards: tuple[Card, ...]
    versions: dict[str, str]
    engines: tuple[Check, ...]
    problems: tuple[str, ...]
    demo: dict[str, str | None] | None = None

    @property
    def works(self) -> bool:
        """Whether at least one engine can run a bundle, and the demo's verdicts are right where it was judged."""
        return any(check.usable for check in self.engines) and self.demo in (None, VERDICTS)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"works": self.works, **asdict(self)}


def diagnose() -> Diagnosis:
    """Examine engines, processors, cards and versions; never raises for what it finds."""
    versions = installed(*_BEFORE, *wheels(), *_AFTER)
    checks = tuple(check for engine in engines.ENGINES if engine.installed if (check := _tried(engine)) is not None)
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpus=available_cpus(),
        cpus_of_host=os.cpu_count() or 1,
        cpus_limited_by=cpus_limited_by(),
        cards=cards(),
        versions=versions,
        engines=checks,
        problems=(*filter(None, [clash(versions)]), *_engine_problems(checks)),
    )


def prove(diagnosis: Diagnosis) -> Diagnosis:
    """Add how the detector in the package judges its pictures, from the file to the verdict, on the default engine."""
    if not any(check.usable for check in diagnosis.engines if check.name == DEFAULT):
        return diagnosis
    verdicts: dict[str, str | None] = {}
    try:
        with warnings.catch_warnings(action="ignore"), demo_detector() as detector:
            verdicts = {name: detector(demo_picture(name)).verdict for name in PICTURES}
        fault = f"the demo's pictures are judged {verdicts}, where {VERDICTS} is right: install mdps again"
    except MdpsError as error:
        fault = str(error)
    wrong = (fault,) * (verdicts != VERDICTS)
    return replace(diagnosis, demo=verdicts, problems=(*diagnosis.problems, *wrong))


def _tried(engine: Engine) -> Check | None:
    if not (engine.complete or named(DEFAULT).installed):
        return Check(engine.name, False, f"it needs {DEFAULT} beside it, for features and scores")
    return module_of(engine).probe(engine)


def _engine_problems(checks: Sequence[Check]) -> list[str]:
    """Return what keeps the default engine from working, or all."""
    faults = [check.reason for check in checks if check.name == DEFAULT and not check.usable]
    if not faults and not any(check.usable for check in checks):
        return ["no engine works here: pip install 'mdps[cpu]', or mdps[gpu] on an NVIDIA card"]
    return faults
