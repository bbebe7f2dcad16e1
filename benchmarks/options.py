"""The options of the studies; without what the studies need, so that a command can list them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mdps.runtime.engines import DEFAULT
from mdps.runtime.errors import require
from mdps.runtime.option import Option, check_ranges
from mdps.runtime.settings import EXIT_SHARES

SCALES = (10.0, 20.0, 50.0, 100.0, 200.0, 300.0)
PRECISIONS = {"bf16-steps": "steps in bfloat16"}
DDAD_SCALE = 4.0  # w of `export.methods.ddad`; its gradient is no unit vector


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The common ones: `choices` are options of `mdps export` by name, without those that the study decides.

    `every` and `largest` as in `evaluate`, `threads` as in `load`. `command` is recorded.
    """

    every: int = 1
    largest: int | None = 256
    threads: int | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True)
class ReproduceOptions(StudyOptions):
    """Choices of a reproduction; None leaves one to the table."""

    table: str
    categories: tuple[str, ...] = ()
    samples: Annotated[
        tuple[int, ...] | None,
        Option(
            "Numbers of posterior samples N_s [default: the table's: 1; 1,16 in 1, 2 and ablation; 1,2,4,8,16 in 5].",
            low=1,
            example="1,2,4",
        ),
    ] = None
    methods: Annotated[
        tuple[str, ...] | None,
        Option(
            "Other detectors on the same denoiser: ddim, anoddpm, autoddpm, ddad, or none [default: the table's].",
            example="anoddpm,autoddpm",
        ),
    ] = None
    peers: Annotated[
        tuple[str, ...],
        Option(
            "Detectors of anomalib, fitted to the good images: patchcore, draem, padim, ..", example="patchcore,draem"
        ),
    ] = ()
    scales: Annotated[
        tuple[float, ...], Option("Guidance scales, of the table rho.", low=0, flag="--rho", example="50,100")
    ] = SCALES
    engine: str = DEFAULT
    batch: Annotated[int, Option("Images judged at once.", low=1)] = 1
    peer_minutes: Annotated[
        float | None, Option("End each iterative fit of a peer within so many.", low=0, above=True, seldom=True)
    ] = None
    textures: Annotated[Path | None, Option("Pictures that DRAEM pastes [default: scikit-image's].", seldom=True)] = (
        None
    )
    device: Annotated[
        str, Option("Where the peers are fitted: auto, cpu, cuda, cuda:N.", flag="--peer-device", seldom=True)
    ] = "cpu"


@dataclass(frozen=True)
class SweepOptions(StudyOptions):
    """Settings to try; `top` counts pixels of a 256 x 256 map, `smoothing` is in pixels of a 64 x 64 image."""

    scales: Annotated[tuple[float, ...], Option("Guidance scales.", low=0, flag="--rho", example="20,100")] = (
        20.0, 50.0, 100.0, 200.0,
    )  # fmt: skip
    etas: Annotated[tuple[float, ...], Option("Weights of the pixel term.", low=0, flag="--eta", example="0.3,1")] = (
        0.1, 0.3, 1.0, 2.0,
    )  # fmt: skip
    lambdas: Annotated[tuple[float, ...], Option("Of the mask.", low=0, flag="--lambda", example="0.1,0.25")] = (
        0.05, 0.1, 0.25,
    )  # fmt: skip
    smoothings: Annotated[
        tuple[float, ...],
        Option("Sigma of the map's blur in pixels of a 64 x 64 image.", low=0, flag="--smoothing", example="0,1"),
    ] = (0.0, 1.0, 2.0)
    tops: Annotated[
        tuple[float, ...],
        Option("Pixels the image score averages, of a 256 x 256 map.", low=0, flag="--top", example="125,500"),
    ] = (125.0, 500.0, 2000.0)
    finalists: Annotated[
        int, Option("How many of the best weightings get a masked pass for each lambda.", low=1, seldom=True)
    ] = 3
    category: str | None = None


@dataclass(frozen=True)
class TradeOptions(StudyOptions):
    """Ways to compare. `steps`: N of each gradient, the largest is the reference's."""

    steps: Annotated[tuple[int, ...], Option("Numbers of steps N.", low=1, example="3,5,10")] = (3, 5, 10)
    free_scale: Annotated[
        float | None,
        Option("Guidance scale of jacobian-free [default: the exact one's].", flag="--jacobian-free-rho", seldom=True),
    ] = None
    ddad_scale: Annotated[float, Option("Guidance scale of ddad.", flag="--ddad-w", seldom=True)] = DDAD_SCALE
    precisions: Annotated[
        tuple[str, ...],
        Option(f"Of {', '.join(PRECISIONS)}, or none.", flag="--reduced", example=",".join(PRECISIONS)),
    ] = tuple(PRECISIONS)
    exits: Annotated[
        tuple[float, ...], Option("Shares of good parts, or none.", flag="--early-exit", example="0.5,0.9")
    ] = (0.5, 0.9)
    calibration: Annotated[int, Option("Good images for int8's ranges and the exits.", low=1, seldom=True)] = 100
    rounds: Annotated[int, Option("Times each way is timed.", low=1)] = 11
    engine: str = DEFAULT

    def __post_init__(self) -> None:
        require(len(set(self.steps)) >= 2, "the study needs at least two numbers of --steps: time is a line over them")
        check_ranges(self)
        for share in self.exits:
            require(share in EXIT_SHARES, f"an early exit is a multiple of 0.05 from 0.05 to 0.95, not {share:g}")
        for name in self.precisions:
            require(name in PRECISIONS, f"there is no precision {name!r}: choose among {', '.join(PRECISIONS)}")


@dataclass(frozen=True)
class PeerOptions:
    """How the detectors are fitted to pictures resized to `size` (H, W). UsageError for values that mean nothing.

    `patches` is the size of a bank in place of its share `coreset`. With `false_alarm_rate` None no image is held apart
    for a threshold, and there are no verdicts.
    """

    size: tuple[int, int]
    backbone: Annotated[str, Option("Feature network of those that take one.")] = "efficientnet_lite0"
    backbone_weights: Annotated[Path | None, Option("Its weights [default: installed or cached].")] = None
    minutes: Annotated[float | None, Option("End an iterative fit within so many minutes.", low=0, above=True)] = None
    steps: Annotated[int | None, Option("Or after so many steps [default: as published].", low=1)] = None
    seed: Annotated[int, Option("Of all that is drawn.", low=0, seldom=True)] = 0
    device: str = "cpu"
    threads: Annotated[int | None, Option("Processor threads [default: all this process may use].", low=1)] = None
    coreset: Annotated[
        float, Option("Share of the patches that PatchCore keeps.", low=0, high=1, above=True, seldom=True)
    ] = 0.02
    patches: Annotated[int | None, Option("Or how many it keeps.", low=1, seldom=True)] = None
    textures: Annotated[Path | None, Option("Pictures that DRAEM pastes [default: scikit-image's].", seldom=True)] = (
        None
    )
    teacher: Annotated[Path | None, Option("Weights of EfficientAD's teacher.", seldom=True)] = None
    imagenette: Annotated[Path | None, Option("Folder of ImageNette, for EfficientAD.", seldom=True)] = None
    false_alarm_rate: Annotated[
        float | None,
        Option("Share of good parts that may fail, as in `mdps calibrate`.", low=0, above=True, seldom=True),
    ] = 0.01

    def __post_init__(self) -> None:
        require(min(self.size) >= 32, f"image size {self.size} is too small for these networks: give at least 32")
        check_ranges(self)
        require(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
            f"there is no device {self.device!r}: use auto, cpu, cuda or cuda:N",
        )
        rate = self.false_alarm_rate
        both = self.patches is not None and self.coreset != PeerOptions.coreset
        require(not both, "the bank of PatchCore is given as a share and as a number: leave out coreset or patches")
        require(rate is None or rate < 1, f"the false-alarm rate {rate} should lie between 0 and 1")
        for name, path in (("textures", self.textures), ("imagenette", self.imagenette)):
            require(path is None or path.is_dir(), f"{path} is no folder: give {name} a folder of pictures")


@dataclass(frozen=True)
class CheckOptions:
    """Extent of a check. UsageError for a name that is not known."""

    minutes: Annotated[float, Option("At most.", low=0, above=True)] = 6.0
    work: Annotated[
        Path | None, Option("Folder of bundles, plans and the oracle's numbers, used again [default: work in --out].")
    ] = None
    device: Annotated[
        str | None, Option("Card: its index as nvidia-smi shows it, or its UUID [default: the first].")
    ] = None
    cpu: Annotated[bool, Option("Check the engines of the processor; every other is named with the reason.")] = False
    networks: Annotated[
        tuple[str, ...], Option("Of the demo's network and one of the authors' size.", example="demo,authors")
    ] = ("demo", "authors")
    precisions: Annotated[tuple[str, ...], Option("Of the denoiser.", example="fp32,fp16")] = ("fp32", "fp16")
    samples: Annotated[int, Option("N_s to measure besides 1.", low=2, seldom=True)] = 16
    steps: Annotated[int, Option("Of each pass.", low=1)] = 10
    rounds: Annotated[int, Option("Runs of each, at most.", low=1, seldom=True)] = 200
    matrix_side: Annotated[int, Option("Of the rates' products.", low=16, seldom=True)] = 8192
    authors_size: Annotated[int, Option("Side of the images of the authors' network.", low=32, seldom=True)] = 256
    threads: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        for given, known in ((self.networks, ("demo", "authors")), (self.precisions, ("fp32", "fp16"))):
            for name in given:
                require(name in known, f"there is no {name!r}: choose among {', '.join(known)}")
