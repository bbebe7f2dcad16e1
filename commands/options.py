"""Options of the commands, in groups; names and ranges only, so that help is quick."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]
Callback = Callable[[click.Context, click.Parameter, str | None], Any]

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output on stdout, messages on stderr.")
PRODUCT = click.option("--product", default="default", show_default=True, help="Which of the bundle's calibrations.")
BACKEND = click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "openvino", "openvino-bf16", "mnn", "auto", "tensorrt", "tensorrt-rtx"]),
    default="onnxruntime",
    show_default=True,
    help="What computes; auto measures once which is fastest on this CPU, and remembers. mnn, tensorrt and "
    "tensorrt-rtx, the last two on an NVIDIA card, run a bundle that was exported for them. openvino-bf16 rounds the "
    "steps to bfloat16, faster on processors that have it, and is calibrated for itself.",
)
PROVIDER = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda", "tensorrt"]),
    default="cpu",
    show_default=True,
    help="Where onnxruntime computes; cuda and tensorrt need an NVIDIA card.",
)
DEVICE = click.option(
    "--device", help="Card to compute on: its index as nvidia-smi shows it, or its UUID [default: CUDA's first]."
)
THREADS = click.option(
    "--threads", type=click.IntRange(1), help="Processor threads [default: all this process may use]."
)
SAMPLES = click.option("--samples", type=click.IntRange(1), help="Posterior samples an image [default: the bundle's].")
EARLY_EXIT = click.option(
    "--early-exit",
    type=click.FloatRange(0, 0.95),
    help="Skip the mask pass where the first one scores no higher than this share of good parts did, 0.05 to 0.95 "
    "[default: the bundle's, which is 0, off].",
)
FALSE_ALARM_RATE = click.option(
    "--false-alarm-rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Share of good parts that may fail.",
)
DATASET = click.argument("dataset", type=click.Path(path_type=Path))
CATEGORIES = click.option(
    "--category", "categories", multiple=True, help="Only this category; may be given several times."
)
EVERY = click.option(
    "--every", type=click.IntRange(1), default=1, show_default=True, help="Judge every n-th test image only."
)
RESOLUTION = click.option(
    "--resolution", type=click.Choice(["256", "full"]), default="256", show_default=True,
    help="Longer side that larger ground truth is reduced to for the pixel metrics; full: as it is.",
)  # fmt: skip


def largest_side(resolution: str) -> int | None:
    """The pixels that RESOLUTION stands for; None for all there are."""
    return None if resolution == "full" else int(resolution)


def listed(kind: Callable[[str], Any], example: str) -> Callback:
    """A callback that reads a list such as 1,2,4 ("none": an empty one); None where the option was not given."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        if value is None:
            return None
        try:
            return () if value == "none" else tuple(kind(part.strip()) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is neither 'none' nor a list such as {example}") from None

    return read


def _show_traceback(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(dict)["traceback"] = True


TRACEBACK = click.option(
    "--traceback", is_flag=True, expose_value=False, callback=_show_traceback, help="Show where an error came from."
)


def _apply(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):  # as a stack of decorators would
        command = option(command)
    return command


def export_choices(command: Command) -> Command:
    """What `ExportOptions` and `LoadOptions` hold, under their names."""
    options = (
        click.option(
            "--method", type=click.Choice(["mdps", "ddim", "anoddpm", "autoddpm", "ddad"]),
            help="The detector, with its publication's settings (docs/methods.md) [default: mdps].",
        ),
        click.option("--preset", help="The authors' settings of a category, such as mvtec/bottle."),
        click.option("--guidance-backend", type=click.Choice(["onnx", "traced"]), default="onnx", show_default=True),
        click.option(
            "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True,
            help="What the denoiser computes in; less than fp32 is for GPUs (docs/gpu.md).",
        ),
        click.option(
            "--gradient", type=click.Choice(["exact", "jacobian-free", "ddad"]),
            help="What guides: the exact gradient, or one without a backward pass at half the cost [default: exact].",
        ),
        click.option(
            "--guidance-norm", type=click.Choice(["l2", "squared"]), help="Of the residual whose gradient guides."
        ),
        click.option(
            "--guidance-scale", type=click.FloatRange(0), help="Strength of the guidance (rho, w); 0 for none."
        ),
        click.option(
            "--masked-guidance-scale", type=click.FloatRange(0), help="That of the masked pass [default: the same]."
        ),
        click.option("--noise-level", type=click.IntRange(1), help="Step T that images are noised to."),
        click.option("--steps", type=click.IntRange(1), help="Denoising steps N of a pass."),
        click.option(
            "--noise", type=click.Choice(["gaussian", "simplex"]),
            help="What images are noised with [default: what the checkpoint was trained on].",
        ),
        click.option(
            "--mask-pass/--no-mask-pass", default=None, help="A second pass under the first one's mask, or not."
        ),
        click.option(
            "--mask-lambda", type=click.FloatRange(0, 1), help="Where the mask's threshold lies from min to max."
        ),
        click.option(
            "--mask-range", type=click.Choice(["per-image", "frozen"]), help="Min and max of the image or good parts."
        ),
        click.option(
            "--samples", type=click.IntRange(1), default=1, show_default=True, help="Posterior samples an image."
        ),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the noise bank."),
        click.option("--backbone", help="Feature network: efficientnet_lite0, or any of timm's."),
        click.option(
            "--backbone-weights", type=click.Path(path_type=Path), help="Its weights [default: installed or cached]."
        ),
        click.option(
            "--stages", callback=listed(int, "1,2,3"),
            help="Its stages to compare, such as 1,2,3; 'none' compares pixels only.",
        ),
        click.option("--eta", type=click.FloatRange(0), help="Weight of the pixel term."),
        click.option(
            "--pixel", type=click.Choice(["l1", "squared", "scaled"]),
            help="The pixel term: absolute, squared, or scaled to the feature distance.",
        ),
        click.option(
            "--feature-size", type=click.IntRange(1), help="Side that the feature network sees smaller images at."
        ),
        click.option("--smoothing-sigma", type=click.FloatRange(0), help="Blur of the map in pixels; 0 for none."),
        click.option("--top", type=click.IntRange(1), help="How many of the map's pixels the image score counts."),
        click.option(
            "--crop", type=click.Choice(["none", "input", "metrics"]), help="Cut the centre of the resized image."
        ),
        click.option("--crop-size", type=click.IntRange(1), help="Side of the cut."),
        click.option("--roi", type=int, nargs=4, help="Region of interest in the photograph: LEFT TOP WIDTH HEIGHT."),
        click.option("--image-size", type=click.IntRange(8), help="Side of the images the network was trained on."),
        click.option("--num-heads", type=click.IntRange(1), help="Attention heads, where the checkpoint does not say."),
        click.option("--num-head-channels", type=click.IntRange(1), help="Channels of a head, instead of --num-heads."),
        click.option(
            "--new-attention-order/--legacy-attention-order", default=None, help="Order of queries, keys, values."
        ),
        click.option("--norm-groups", type=click.IntRange(1), help="Groups of each group norm, usually 32."),
        click.option("--prediction", type=click.Choice(["eps", "v", "x0"]), help="What the network predicts."),
        click.option(
            "--schedule", type=click.Choice(["linear", "scaled_linear", "cosine"]), help="Noise schedule of training."
        ),
    )  # fmt: skip
    return _apply(options, command)


def plan_choices(command: Command) -> Command:
    """Which engine plans an export builds, under the names of `ExportOptions`."""
    options = (
        click.option(
            "--backend", type=click.Choice(["tensorrt", "tensorrt-rtx", "mnn"]),
            help="Write this library's own files too: engine plans for a card (docs/gpu.md), or graphs for the CPU.",
        ),
        click.option(
            "--compute-capability", callback=_capabilities,
            help="Of the cards the plans are for [default: this machine's card; tensorrt-rtx: 8.6,8.9,12.0].",
        ),
        click.option(
            "--engines", callback=listed(str, "onnxruntime,mnn"),
            help="Those of the processor that must compute the same as onnxruntime [default: all that are installed].",
        ),
        click.option(
            "--max-batch", type=click.IntRange(1), default=8, show_default=True,
            help="Posterior samples that the plans' steps take at once, at most.",
        ),
    )  # fmt: skip
    return _apply(options, command)


def _capabilities(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    parts = tuple(part.strip() for part in value.split(","))
    for part in parts:
        if re.fullmatch(r"\d{2,3}", part):
            raise click.BadParameter(f"{part!r} lacks its dot: one is written as {part[:-1]}.{part[-1]}")
    if not all(re.fullmatch(r"\d+\.\d", part) for part in parts):
        raise click.BadParameter(f"{value!r} is no list of compute capabilities such as 8.6,12.0")
    return parts


def bench_choices(command: Command) -> Command:
    """What `BenchOptions` holds, under its names."""
    path, names, counts = click.Path(path_type=Path), listed(str, "patchcore,draem"), listed(int, "2,4,8")
    options = (
        click.option("--ckpt", type=path, help="The bundle's checkpoint, for torch [default: beside the bundle]."),
        click.option(
            "--backends", callback=names, default="onnxruntime,openvino,mnn,openvino-bf16", show_default=True,
            help="Of ours, or none.",
        ),
        click.option(
            "--torch", "ways", callback=names, default="authors,eager,compile", show_default=True,
            help="Ways of running the checkpoint in torch, or none.",
        ),
        click.option(
            "--methods", callback=names, default="anoddpm,autoddpm", show_default=True,
            help="Other detectors on our runtime, exported from the checkpoint; or none.",
        ),
        click.option(
            "--peers", callback=names, default="patchcore,draem", show_default=True,
            help="Detectors of anomalib: patchcore, draem, padim, efficientad; or none.",
        ),
        click.option(
            "--batches", callback=counts, default="4", show_default=True, help="Batches to measure besides 1, or none."
        ),
        click.option(
            "--samples", callback=counts, default="4", show_default=True, help="N_s to measure besides 1, or none."
        ),
        click.option(
            "--sizes", callback=counts, default="none", show_default=True,
            help="Sides of images to measure as well, such as 64,96,128, exported from the checkpoint.",
        ),
        click.option(
            "--single-file", "one_file", is_flag=True,
            help="Also the calibrated bundle as one ONNX file, in plain ONNX Runtime.",
        ),
        click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times each one runs."),
        click.option(
            "--warm-up", type=click.IntRange(0), default=1, show_default=True, help="Runs before, after the first."
        ),
        click.option(
            "--device", default="cpu", show_default=True,
            help="Where all run: cpu, cuda, or a card's index as nvidia-smi shows it, or its UUID.",
        ),
        click.option("--good", type=path, help="Good parts for the peers' memory [default: made-up images]."),
        click.option(
            "--bank-images", type=click.IntRange(1), default=200, show_default=True, help="How many of them."
        ),
        click.option("--backbone-weights", type=path, help="Of the feature network, for torch, as at the export."),
        click.option(
            "--patience", type=click.FloatRange(0, min_open=True), default=1800.0, show_default=True,
            help="Seconds after which a competitor that answers nothing is given up.",
        ),
    )  # fmt: skip
    return _apply(options, command)


def training_choices(command: Command) -> Command:
    """What changes a training recipe, under the names of `TrainingConfig`."""
    more = click.FloatRange(0, min_open=True)
    options = (
        click.option("--epochs", type=click.IntRange(1), help="Passes over the images [default: 2000, small: none]."),
        click.option("--steps", type=click.IntRange(1), help="Training steps, instead of epochs [small: 4000]."),
        click.option("--minutes", type=more, help="End within so many minutes."),
        click.option("--batch", type=click.IntRange(1), help="Images a step, of all processes together [default: 8]."),
        click.option("--optimizer", type=click.Choice(["adam", "adamw"]), help="[default: adam, small: adamw]"),
        click.option("--learning-rate", type=more, help="[default: 1e-4, small: 4e-4]"),
        click.option("--weight-decay", type=click.FloatRange(0), help="[default: 0.05, small: 0.01]"),
        click.option(
            "--decay", type=click.Choice(["constant", "linear", "cosine"]), help="Of the learning rate "
            "[default: constant, small: cosine].",
        ),
        click.option("--warmup", type=click.IntRange(0), help="Steps the rate rises over [default: 0, small: 100]."),
        click.option("--clip", type=more, help="Largest norm of the gradient [default: none]."),
        click.option(
            "--ema", type=click.FloatRange(0, 1), help="Decay of the weights' average that is kept; 0 keeps the last "
            "[default: 0, small: 0.999].",
        ),
        click.option("--weighting", type=click.Choice(["uniform", "min-snr"]), help="Of the loss [default: uniform]."),
        click.option(
            "--low-share", type=click.FloatRange(0, 1), help="Share of timesteps drawn below 260, where sampling works "
            "[default: 0, small: 0.7].",
        ),
        click.option(
            "--noise", type=click.Choice(["gaussian", "simplex"]), help="Mixed into images; simplex is AnoDDPM's "
            "[default: gaussian].",
        ),
        click.option("--flip-horizontal", is_flag=True, default=None, help="Parts may be mirrored left to right."),
        click.option("--flip-vertical", is_flag=True, default=None, help="Parts may be mirrored top to bottom."),
        click.option("--rotate", is_flag=True, default=None, help="Parts may be turned by quarters."),
        click.option("--shift", type=click.IntRange(0), help="Parts may be moved by so many pixels [default: 0]."),
        click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="[default: fp32]"),
        click.option("--compile", is_flag=True, default=None, help="Compile the network with torch first."),
        click.option("--seed", type=click.IntRange(0), help="[default: 0]"),
        click.option("--log-every", type=click.IntRange(1), help="Steps between lines of the log [default: 100]."),
        click.option("--checkpoint-every", type=click.IntRange(1), help="Steps between checkpoints [default: 1000]."),
        click.option("--checkpoint-minutes", type=more, help="Or minutes, whichever comes first [default: 5]."),
        click.option(
            "--sample-every", type=click.IntRange(0), help="Steps between reconstructions to look at; 0: only at the "
            "end [default: 1000].",
        ),
    )  # fmt: skip
    return _apply(options, command)
