"""Breaks one expression of the method at a time: a test must fail. `python tests/mutants.py [NAME ..] [--report FILE]`

Each is changed in a copy of the tree, and only the tests named beside it run there. It is "killed" where one of
them fails, and they pass without the change; "survived" where nobody notices: then a test is missing. Every run begins
as a fork of a process that has loaded torch already (Linux, macOS).

Functions and tests are found by their names, and the code by its syntax: what moves or is laid out anew stays found.
"""

import argparse
import ast
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOADED = ["pytest", "numpy", "PIL.Image", "torch", "onnx", "onnxruntime", "diffusers.schedulers.scheduling_ddim"]
PACKAGES = ("benchmarks", "commands", "export", "models", "runtime", "serving", "training", "tuning")
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "out", "runs", "demo-report", "build", "dist")
LONGEST = 3600.0  # seconds of one run; a busy machine is no survivor
BROKEN = "the change or the tests do not load"


@dataclass(frozen=True)
class Mutant:
    """`code`, which `function` has once, becomes `broken`; then `what` is wrong, and one of `tests` fails.

    `function` is a name as in `Class.method` that only one function with such code has. `code` is an expression or a
    statement. A test may be written as `test_file::test_name` where several files have one of that name.
    """

    name: str
    function: str
    code: str
    broken: str
    what: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The bytes of a file between `start` and `end`, which hold a mutant's code."""

    file: Path
    start: int
    end: int

    def replaced(self, new: str) -> bytes:
        text = self.file.read_bytes()
        return text[: self.start] + new.encode() + text[self.end :]


class NotFoundError(Exception):
    """The list is out of date: a name or a piece of code is not there, or there several times."""


def place_of(mutant: Mutant, root: Path) -> Place:
    """Return where the mutant's code stands below `root`; raise NotFoundError unless it is one place."""
    wanted, last = parsed(mutant.code), mutant.function.rpartition(".")[2]
    functions, places = 0, []
    for file in sources(root):
        text = file.read_bytes()
        if f"def {last}(".encode() not in text:
            continue
        for name, function in functions_of(ast.parse(text)):
            if f".{name}".endswith(f".{mutant.function}"):
                functions += 1
                places += [Place(file, *span(node, text)) for node in ast.walk(function) if is_same(node, wanted)]
    if len(places) == 1:
        return places[0]
    if not functions:
        raise NotFoundError(f"{mutant.name}: there is no function {mutant.function}")
    raise NotFoundError(f"{mutant.name}: {mutant.function} has this {len(places)} times and not once: {mutant.code}")


def sources(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def functions_of(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function below `node` with its dotted name."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        yield from functions_of(child, f"{prefix}{child.name}." if named else prefix)


def parsed(code: str) -> ast.expr | ast.stmt:
    (statement,) = ast.parse(code if not code.startswith("return ") else f"def f():\n    {code}").body
    if isinstance(statement, ast.FunctionDef):
        (statement,) = statement.body
    return statement.value if isinstance(statement, ast.Expr) else statement


def is_same(node: ast.AST, wanted: ast.AST) -> bool:
    return type(node) is type(wanted) and ast.dump(node) == ast.dump(wanted)


def span(node: ast.AST, text: bytes) -> tuple[int, int]:
    """Return the bytes of `text` that an expression or statement takes."""
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in (node.lineno - 1, node.end_lineno - 1)]
    return starts[0] + node.col_offset, starts[1] + node.end_col_offset


def written(mutant: Mutant) -> str:
    """Return the broken code as it stands in the place of the old, whatever is around it."""
    return f"({mutant.broken})" if isinstance(parsed(mutant.broken), ast.expr) else mutant.broken


def test_of(test: str, root: Path) -> str:
    """Return pytest's address, below tests/, of a test given by its name."""
    file, _, name = test.rpartition("::")
    function = name.partition("[")[0]
    paths = [p for p in (root / "tests").rglob(f"{file or 'test_*'}.py") if f"def {function}(" in p.read_text()]
    if len(paths) != 1:
        raise NotFoundError(f"{len(paths)} files have a test {test}, and not one")
    return f"{paths[0].relative_to(root / 'tests').as_posix()}::{name}"


MUTANTS = (
    # the plan of a pass
    Mutant(
        "paper-index", "_paper_times",
        "[(t - 1.0, alpha[t], alpha[t - stride]) for t in range(level, 0, -stride)]",
        "[(t - 0.0, alpha[t], alpha[t - stride]) for t in range(level, 0, -stride)]",
        "the network is told t, and not t - 1",
        ("test_paper_times_follow_algorithm_1",),
    ),
    Mutant(
        "paper-alpha-offset", "_paper_times",
        "alpha = [1.0, *schedule.alphas_cumprod.tolist()]",
        "alpha = [*schedule.alphas_cumprod.tolist(), 1.0]",
        "alpha(t) is alphas_cumprod[t], and not [t - 1]; the last step does not land on 1",
        ("test_paper_times_follow_algorithm_1",),
    ),
    Mutant(
        "reference-last-step", "_reference_times",
        "alpha[t - skip] if t >= skip else 1.0",
        "alpha[max(0, t - skip)]",
        "the authors' last step does not land on 1",
        ("test_reference_times_are_those_of_the_authors_code[200-10-180]",),
    ),
    Mutant(
        "sigma", "_sigma",
        "math.sqrt(1 - alpha_t / alpha_s)",
        "math.sqrt(1 - alpha_t)",
        "sigma without the ratio of the alphas",
        ("test_sigma_is_diffusers_variance[paper]",),
    ),
    # the loop
    Mutant(
        "first-noise", "noise_root",
        "return np.float32(np.sqrt(np.float32(1 - alpha)))",
        "return np.float32(1 - np.sqrt(np.float32(alpha)))",
        "1 - sqrt(a) for the noise of the first x_t, and not sqrt(1 - a)",
        ("test_the_known_part_is_noised_with_the_initial_noise",),
    ),
    Mutant(
        "image-major", "posterior_sampling",
        "y, m = np.repeat(observation, samples, axis=0), np.repeat(mask, samples, axis=0)",
        "y, m = np.tile(observation, (samples, 1, 1, 1)), np.tile(mask, (samples, 1, 1, 1))",
        "samples lie sample by sample, and are read image by image",
        ("test_sampler::test_a_result_depends_on_neither_batch_nor_order[paper]",),
    ),
    Mutant(
        "noise-order", "NoiseBank.draw",
        "noise = self._keep(key, np.tile(noise[:samples], (images, 1, 1, 1)))",
        "noise = self._keep(key, np.repeat(noise[:samples], images, axis=0))",
        "which noise an image gets depends on its batch",
        ("test_sampler::test_a_result_depends_on_neither_batch_nor_order[paper]",),
    ),
    Mutant(
        "tile-noise", "NoiseBank.tile",
        "return np.roll(self.draw(pass_index, step_index, samples), (-corner[0], -corner[1]), axis=(2, 3))",
        "return self.draw(pass_index, step_index, samples)",
        "the noise of a pixel depends on the tile it lies in",
        ("test_tiles::test_a_pixel_meets_the_same_noise_in_every_tile[gaussian]",),
    ),
    Mutant(
        "tile-weights", "shares",
        "np.sin(np.pi * (np.arange(tile) + 0.5) / tile) ** 2",
        "np.ones(tile)",
        "all of a tile counts the same, so that its border shows",
        ("test_tiles::test_a_tile_counts_little_at_its_borders_but_at_those_of_the_picture",),
    ),
    Mutant(
        "tile-score", "image_score",
        "count = min(settings.top, values.size)",
        "count = min(4 * settings.top, values.size)",
        "the score of a photograph counts other pixels than a tile's",
        ("test_tiles::test_the_score_is_the_score_graphs[top_mean]",),
    ),
    Mutant(
        "noise-key", "NoiseBank._one",
        "[self.seed, sample, pass_index, step_index + 1, *self.shape]",
        "[self.seed, sample, 0, step_index + 1, *self.shape]",
        "both passes get the same noise",
        ("test_equal_keys_give_equal_noise_and_others_do_not",),
    ),
    Mutant(
        "step-scalars", "step_scalars",
        "step.alpha_s",
        "step.alpha_t",
        "a step goes nowhere",
        ("test_the_unguided_pass_is_ddim_of_diffusers[paper]",),
    ),
    # one step
    Mutant(
        "mask-blend", "keep_normal",
        "return known + mask * (sample - known)",
        "return sample + mask * (known - sample)",
        "the mask the other way round",
        ("test_every_variant_at_every_batch[biggan-Grouped]",),
    ),
    Mutant(
        "residual-norm", "residual_direction",
        "length = torch.sqrt((residual * residual).sum(dim=(1, 2, 3), keepdim=True))",
        "length = torch.sqrt((residual * residual).sum(dim=(0, 1, 2, 3), keepdim=True))",
        "one norm over the whole batch",
        ("test_every_variant_at_every_batch[biggan-Grouped]",),
    ),
    Mutant(
        "guidance-sign", "GuidedStep.forward",
        "guided = eps + guidance_scale * torch.sqrt(1 - alpha_t) * gradient",
        "guided = eps - guidance_scale * torch.sqrt(1 - alpha_t) * gradient",
        "guidance away from the observation",
        ("test_every_variant_at_every_batch[biggan-Grouped]",),
    ),
    Mutant(
        "gradient-rsqrt-alpha", "GuidedStep._guidance",
        "return eps, (u - torch.sqrt(1 - alpha) * self._pulled(pullback, u)) * torch.rsqrt(alpha)",
        "return eps, u - torch.sqrt(1 - alpha) * self._pulled(pullback, u)",
        "the gradient without 1 / sqrt(a)",
        ("test_every_variant_at_every_batch[biggan-Grouped]",),
    ),
    Mutant(
        "spread-without-sigma", "PlainStep._update",
        "spread = torch.sqrt(torch.clamp(1 - alpha_s - sigma * sigma, min=0.0))",
        "spread = torch.sqrt(torch.clamp(1 - alpha_s - sigma, min=0.0))",
        "sigma, and not its square, is taken from the noise's share",
        ("test_every_variant_at_every_batch[biggan-Grouped]",),
    ),
    # the network and its pullback
    Mutant(
        "sin-cos", "timestep_embedding",
        "return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)",
        "return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)",
        "the time embedding of another library",
        ("test_embedding_is_cos_then_sin[0.0]",),
    ),
    Mutant(
        "flip", "prepare_input_gradients",
        "flipped = module.weight.detach().transpose(0, 1).flip(2, 3).contiguous()",
        "flipped = module.weight.detach().transpose(0, 1).contiguous()",
        "the pullback convolves with weights that are not flipped",
        ("test_output_and_pullback_equal_autograd[biggan-Grouped-1]",),
    ),
    Mutant(
        "skip-order", "linearize.pull",
        "g = pullback(g + skip_gradients.pop())",
        "g = pullback(g + skip_gradients.pop(0))",
        "the gradients of the skips in the order of the decoder",
        ("test_output_and_pullback_equal_autograd[pooled_one_head-Grouped-1]",),
    ),
    Mutant(
        "attention-scale", "_attention",
        "scale = (channels // block.heads) ** -0.5",
        "scale = channels**-0.5",
        "the width of all heads, and not of one",
        ("test_output_and_pullback_equal_autograd[biggan-Grouped-1]",),
    ),
    Mutant(
        "attention-pullback", "_attention.pull",
        "g_qkv = _join_heads(g_q * scale, g_k, g_v, block.new_order)",
        "g_qkv = _join_heads(g_q, g_k, g_v, block.new_order)",
        "the scale is missing in the gradient of q",
        ("test_output_and_pullback_equal_autograd[biggan-Grouped-1]",),
    ),
    Mutant(
        "silu-grouped", "Grouped.silu",
        "slope = s + y * (1 - s)",
        "slope = s + s * (1 - s)",
        "derivative of another function",
        ("test_a_norm_of_values_far_from_zero_keeps_its_digits[Grouped]",),
    ),
    Mutant(
        "silu-by-depthwise", "ByDepthwise.silu",
        "slope = minus_s - y * q",
        "slope = minus_s + y * q",
        "a sign of the same in MNN's form",
        ("test_a_norm_of_values_far_from_zero_keeps_its_digits[ByDepthwise]",),
    ),
    Mutant(
        "mnn-product-sides", "_Graph._product",
        "first, second = ((source, not turned) for source, turned in (second, first))",
        "first, second = ((source, turned) for source, turned in (second, first))",
        "a product with its factors exchanged and not turned round",
        ("test_the_rewritten_graph_computes_the_same",),
    ),
    Mutant(
        "mnn-one-more-term", "_Graph._one_more_term",
        "np.full((1, columns), -1, np.float32)",
        "np.full((1, columns), 1, np.float32)",
        "the softmax rule's shift is added",
        ("test_the_rewritten_graph_computes_the_same",),
    ),
    Mutant(
        "mnn-small-convolution", "_Graph.transpose_small_convolutions",
        "self._array(weights.name).transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]",
        "self._array(weights.name).transpose(1, 0, 2, 3)",
        "filters are not turned round",
        ("test_the_rewritten_graph_computes_the_same",),
    ),
    Mutant(
        "silu-by-channel", "ByChannel.silu.pull",
        "return stats.pull(g * ((1 - q) * (1 - opposite * q)))",
        "return stats.pull(g * ((1 - q) * (1 + opposite * q)))",
        "a sign of the same in the other form",
        ("test_a_norm_of_values_far_from_zero_keeps_its_digits[ByChannel]",),
    ),
    Mutant(
        "norm-pullback", "Grouped.__call__.pull",
        "return (g_hat - x_hat * inner - g_hat.mean(dim=-1, keepdim=True)).reshape(g.shape)",
        "return (g_hat - x_hat * inner).reshape(g.shape)",
        "the norm's mean counts as a constant",
        ("test_a_norm_of_values_far_from_zero_keeps_its_digits[Grouped]",),
    ),
    Mutant(
        "group-mean", "_Statistics._by_group",
        "averaging = member.t() * (self.groups / channels)",
        "averaging = member.t() / channels",
        "means of groups too small by the number of groups",
        ("test_a_norm_of_values_far_from_zero_keeps_its_digits[ByChannel]",),
    ),
    # maps, mask and score
    Mutant(
        "mask-side", "_mask",
        "return (anomaly_map > low + factor * (high - low)).to(anomaly_map.dtype)",
        "return (anomaly_map >= low + factor * (high - low)).to(anomaly_map.dtype)",
        "a map that is flat masks everything",
        ("test_equal_images_have_no_pixel_term",),
    ),
    Mutant(
        "mask-frozen-high", "_mask",
        "high = torch.where(frozen > 0, high, anomaly_map.amax(dim=(1, 2, 3), keepdim=True))",
        "high = anomaly_map.amax(dim=(1, 2, 3), keepdim=True)",
        "a frozen range whose upper end is the image's own",
        ("test_a_frozen_mask_range_replaces_the_maps_own",),
    ),
    Mutant(
        "mask-range-per-image", "mask_scalars",
        'frozen = float(mask_range is not None and settings.range != "per-image")',
        "frozen = float(mask_range is not None)",
        "a range that happens to be there replaces each image's own",
        ("test_a_mask_per_image_takes_no_range_from_elsewhere",),
    ),
    Mutant(
        "top-mean", "Score._image_score",
        "return values.topk(self.settings.top).values.mean(dim=1)",
        "return values.mean(dim=1)",
        "the score is the mean of all pixels",
        ("test_paper_map_of_the_golden_features",),
    ),
    Mutant(
        "feature-cosine", "Features.forward",
        "torch.clamp((f * f).sum(dim=1, keepdim=True), min=1e-16)",
        "torch.clamp((f * f).sum(dim=(1, 2, 3), keepdim=True), min=1e-16)",
        "features are normalised over the image, and not at each place",
        ("test_paper_map_of_the_golden_features",),
    ),
    Mutant(
        "feature-upsampling", "Score._feature_distance",
        "self.settings.align_corners",
        "False",
        "the authors' alignment of corners is ignored",
        ("test_reference_map_of_the_golden_features[0]",),
    ),
    Mutant(
        "pixel-weight", "Score._difference",
        "return (feature + self.settings.eta * self._pixel(residual, feature)).mean(dim=1)",
        "return (feature + self._pixel(residual, feature)).mean(dim=1)",
        "eta is ignored",
        ("test_paper_map_of_the_golden_features",),
    ),
    Mutant(
        "pixel-weight-alone", "Score._difference",
        "return (self.settings.eta * residual.sum(dim=2, keepdim=True)).mean(dim=1)",
        "return residual.sum(dim=2, keepdim=True).mean(dim=1)",
        "eta is ignored where there are no features",
        ("test_a_map_of_pixels_alone_is_their_weighted_difference",),
    ),
    Mutant(
        "samples-mean", "Score._difference",
        "return (self.settings.eta * residual.sum(dim=2, keepdim=True)).mean(dim=1)",
        "return (self.settings.eta * residual.sum(dim=2, keepdim=True)).amax(dim=1)",
        "the worst sample, and not the mean of all",
        ("test_a_map_of_pixels_alone_is_their_weighted_difference",),
    ),
    # verdicts
    Mutant(
        "threshold-rank", "good_threshold",
        "rank = min(count, math.ceil((count + 1) * (1 - false_alarm_rate) - 1e-9))",
        "rank = min(count, math.ceil(count * (1 - false_alarm_rate) - 1e-9))",
        "the plain quantile: more false alarms than promised",
        ("test_the_promised_rate_holds_on_new_images[30-0.3]",),
    ),
    Mutant(
        "mask-range-pass", "calibrate",
        "good.first.low",
        "good.last.low",
        "the frozen mask range is measured on the last maps",
        ("test_calibrate_measures_threshold_and_ranges",),
    ),
    Mutant(
        "exit-below-threshold", "exit_limit",
        "return min(calibration.first_quantiles[EXIT_SHARES.index(share)], calibration.threshold)",
        "return calibration.first_quantiles[EXIT_SHARES.index(share)]",
        "who would fail may leave early",
        ("test_an_early_exit_is_below_its_share_of_good_parts_and_below_the_threshold",),
    ),
    Mutant(
        "exit-side", "Pipeline._inspect",
        'leaves = first["anomaly_score"] <= (-np.inf if exit_limit is None else exit_limit)',
        'leaves = first["anomaly_score"] < (-np.inf if exit_limit is None else exit_limit)',
        "the good part that set the limit does not leave",
        ("test_who_scores_as_the_limit_leaves_early_and_who_scores_as_the_threshold_passes",),
    ),
    Mutant(
        "verdict-side", "Detector._result",
        'verdict = "fail" if score > threshold else "pass"',
        'verdict = "fail" if score >= threshold else "pass"',
        "the good part that set the threshold fails",
        ("test_who_scores_as_the_limit_leaves_early_and_who_scores_as_the_threshold_passes",),
    ),
    Mutant(
        "first-sample", "Detector._result",
        "index * (len(samples) // len(found.anomaly_map))",
        "index",
        "a result shows the sample of another image",
        ("test_the_map_averages_over_samples[2]",),
    ),
    # pictures
    Mutant(
        "channel-order", "to_unit",
        "rgb.transpose(2, 0, 1).astype(np.float32)",
        "rgb[..., ::-1].transpose(2, 0, 1).astype(np.float32)",
        "BGR",
        ("test_resize_is_the_antialiased_bilinear_of_torch",),
    ),
    Mutant(
        "resize", "Preprocessing.view",
        "picture = picture.resize(size, Image.Resampling.BILINEAR)",
        "picture = picture.resize(size, Image.Resampling.BICUBIC)",
        "another filter than in training",
        ("test_resize_is_the_antialiased_bilinear_of_torch",),
    ),
    Mutant(
        "rounding", "to_uint8",
        "levels = np.rint((np.clip(chw, -1, 1) + 1) * 127.5)",
        "levels = (np.clip(chw, -1, 1) + 1) * 127.5",
        "levels are cut off, and not rounded",
        ("test_units_are_exact_and_reversible",),
    ),
    # gates
    Mutant(
        "parity-nan", "Report.failures",
        "return [name for name, error in self.errors.items() if not error <= self.tolerances.get(name, 0.0)]",
        "return [name for name, error in self.errors.items() if error > self.tolerances.get(name, 0.0)]",
        "a network that gives NaN passes the gate of an export",
        ("test_the_gate_keeps_the_worst_error_and_lets_no_nan_through",),
    ),
    Mutant(
        "parity-worst", "Report.compare",
        "self.errors[name] = float(np.maximum(self.errors.get(name, 0.0), error))",
        "self.errors[name] = error",
        "only the last comparison counts",
        ("test_the_gate_keeps_the_worst_error_and_lets_no_nan_through",),
    ),
    Mutant(
        "file-hash", "_verify",
        "FileEntry.of(path).sha256 != entry.sha256",
        "not entry.sha256",
        "a changed file of the right size is loaded",
        ("test_one_flipped_bit_is_found",),
    ),
    Mutant(
        "plan-release", "check_plan",
        "entry.version != version",
        'entry.version.split(".")[0] != version.split(".")[0]',
        "a plan of another minor release is given to the library",
        ("test_a_plan_is_for_its_very_release_and_for_its_cards",),
    ),
    Mutant(
        "plan-card", "check_plan",
        "card.compute_capability not in entry.compute_capabilities",
        "not entry.compute_capabilities",
        "a plan of another card is given to the library",
        ("test_a_plan_is_for_its_very_release_and_for_its_cards",),
    ),
    # the server
    Mutant(
        "token", "Guard._check_token",
        "hmac.compare_digest(_digest(given.strip().encode()), self._digest)",
        "hmac.compare_digest(_digest(given.strip().encode())[:0], self._digest[:0])",
        "any token opens",
        ("test_only_the_very_token_opens_the_door",),
    ),
    Mutant(
        "queue-bound", "Model.check_room",
        "waiting >= self._limit or (waiting and wait + self._worker.seconds > left)",
        "waiting > self._limit or (waiting and wait + self._worker.seconds > left)",
        "one request more than was said",
        ("test_the_queue_holds_as_many_as_was_said",),
    ),
    Mutant(
        "reload-mixes", "Worker._gather",
        "is_other = item.engine is not batch[0].engine",
        "is_other = item.engine is None",
        "after a reload images are judged by the model before it",
        ("test_each_item_is_judged_by_the_engine_it_was_prepared_for",),
    ),
    # a tuned detector, and whether one sees defects at all
    Mutant(
        "cascade-band", "Fused._one",
        'cascade.low <= float(found["anomaly_score"][0]) <= cascade.high',
        'cascade.low < float(found["anomaly_score"][0]) < cascade.high',
        "an image on the end of the band is not judged again",
        ("test_a_cascade_sends_exactly_its_band_to_the_published_method",),
    ),
    Mutant(
        "cascade-cut", "_mapped",
        "np.clip(score, low, np.float32(cascade.high))",
        "score",
        "the published score leaves the band",
        ("test_a_cascade_sends_exactly_its_band_to_the_published_method",),
    ),
    Mutant(
        "cascade-room", "bands",
        "floor((len(good) + 1) * room + 1e-09)",
        "floor((len(good) + 1) * room + 1e-09) + 1",
        "the band holds more good parts than the budget has time for",
        ("test_the_band_is_the_widest_that_the_budget_allows",),
    ),
    Mutant(
        "cascade-alarms", "Compared.of",
        "np.sort(good[1])[-1 - failing]",
        "np.sort(good[1])[-2 - failing]",
        "the published method finds more at one false alarm more",
        ("test_a_published_method_that_finds_clearly_more_is_chosen",),
    ),
    Mutant(
        "cascade-chance", "_Look._compared",
        "chance(compared.gained, compared.lost) > CHANCE",
        "compared.gained <= compared.lost",
        "a gain by chance chooses a cascade",
        ("test_one_that_does_not_is_not",),
    ),
    Mutant(
        "cascade-scale", "Compared.of",
        "threshold / limit",
        "1.0",
        "the published method's threshold does not fall on the tuned one's",
        ("test_both_thresholds_meet_on_the_scale_of_the_tuned_one",),
    ),
    Mutant(
        "cascade-whole", "_Look._told",
        "both.missed >= alone.missed",
        "both.missed > alone.missed",
        "a cascade stays that finds nothing more",
        ("test_one_that_finds_no_more_of_all_together_is_dropped",),
    ),
    Mutant(
        "fusion-scale", "Fusion.__init__",
        "[term.weight / (term.high - term.low) for term in terms]",
        "[term.weight for term in terms]",
        "terms are not on one scale",
        ("test_fusion_is_the_weighted_sum_on_one_scale",),
    ),
    Mutant(
        "other-tuning", "_calibration",
        "calibration.tuned != bundle.tuned",
        "False",
        "the threshold of another detector of the bundle applies",
        ("test_a_calibration_is_of_one_tuning",),
    ),
    Mutant(
        "fitness-floor", "Fitness.fit",
        "self.auroc >= FLOOR",
        "self.auroc > FLOOR",
        "a detector at the floor is refused",
        ("test_of_another_nothing_is_said",),
    ),
    Mutant(
        "fitness-refused", "_calibration",
        "calibration.doubt and not options.force",
        "False",
        "a detector that sees no defects gives verdicts",
        ("test_predict_refuses_it_in_one_sentence",),
    ),
    Mutant(
        "tuning-ties", "_equal",
        "differences.mean() <= differences.std(ddof=1) / np.sqrt(len(differences))",
        "differences.mean() <= 0",
        "a candidate that a few defects do not tell from the best is no equal",
        ("test_of_equals_the_simpler_and_then_the_better_is_chosen",),
    ),
    Mutant(
        "tuning-worst", "worst_aware",
        "sorted(kind.mean for kind in kinds.values())",
        "sorted((kind.mean for kind in kinds.values()), reverse=True)",
        "the best kinds count most",
        ("test_the_worst_kinds_count_most",),
    ),
    Mutant(
        "tuning-fitted", "_known",
        "name in fitted",
        "False",
        "a threshold by images that a tuning was fitted to",
        ("test_a_calibration_goes_by_scores_that_no_image_took_part_in",),
    ),
    Mutant(
        "tuning-folds", "out_of_fold",
        "[one[others] for one in inputs]",
        "inputs",
        "what is left out of a fit takes part in it",
        ("test_maps_of_good_images_are_as_those_of_further_ones",),
    ),
    Mutant(
        "tuning-sizes", "_hedges",
        "one.value >= chosen.value - HEDGE",
        "one.value <= chosen.value - HEDGE",
        "both sizes take the place of one where they are worse",
        ("test_both_sizes_take_the_place_of_one_where_they_are_hardly_worse",),
    ),
    # regions
    Mutant(
        "region-corners", "_Runs.owners",
        'np.searchsorted(self.rows * stride + self.starts, below + self.ends, side="right")',
        'np.searchsorted(self.rows * stride + self.starts, below + self.ends, side="left")',
        "a region ends at a corner",
        ("test_corners_connect_and_a_gap_of_a_pixel_does_not",),
    ),
    Mutant(
        "region-limit", "Detector.pixel_limit",
        "return self.calibration.threshold if in_unit_of_map else self.calibration.map_high",
        "return self.calibration.map_high",
        "an image fails and lists no region",
        ("test_a_score_that_is_no_value_of_the_map_leaves_the_hottest_good_pixel_as_the_limit",),
    ),
    Mutant(
        "region-place", "find",
        "other[0] - corner[0]",
        "other[0]",
        "a box ends somewhere else on the photograph",
        ("test_a_region_lies_on_the_photograph_where_the_map_shows_it",),
    ),
    Mutant(
        "align-turn", "Reference.find",
        "left < share * residual",
        "left < residual",
        "a round part is turned as chance has it",
        ("test_a_round_part_is_shifted_and_not_turned",),
    ),
    Mutant(
        "align-limit", "Aligner.fault",
        "found.residual > self._limit",
        "False",
        "another part is moved to where it looks least unlike",
        ("test_what_cannot_be_aligned_is_said_and_left_as_it_lies",),
    ),
    Mutant(
        "align-far", "Aligner.fault",
        "shift > FARTHEST",
        "shift > 1",
        "a part that is half outside is moved as if it were there",
        ("test_what_cannot_be_aligned_is_said_and_left_as_it_lies",),
    ),
    Mutant(
        "align-edge", "Aligner.__call__",
        "self._reference.warped(np.asarray(picture), pose.matrix, np.array(ground))",
        "self._reference.warped(np.asarray(picture), pose.matrix)",
        "what comes into view are streaks",
        ("test_what_comes_into_view_is_the_references_as_bright_as_the_picture",),
    ),
    Mutant(
        "align-midst", "_midmost",
        "residual <= fit",
        "residual >= 0",
        "an odd image is the reference",
        ("test_the_reference_lies_in_the_midst_and_odd_images_do_not_become_it",),
    ),
    Mutant(
        "align-back", "Detector._as_it_lay",
        "back(result.anomaly_map)",
        "result.anomaly_map",
        "a map lies beside its picture",
        ("test_what_is_judged_is_the_moved_picture_and_its_map_lies_as_the_picture_did",),
    ),
    Mutant(
        "align-judge", "Detector.judge",
        "len(given.poses) != len(given)",
        "False",
        "what was not aligned is judged as if it were",
        ("test_observations_that_were_not_aligned_are_refused",),
    ),
    Mutant(
        "align-calibration", "_calibration",
        "calibration.aligned != manifest.aligned(product)",
        "False",
        "a threshold of parts that lay otherwise",
        ("test_a_calibration_holds_for_the_alignment_it_was_made_with",),
    ),
    Mutant(
        "scope-score", "restricted",
        "found.anomaly_map[:, 0, inside]",
        "found.anomaly_map[:, 0, inside | True]",
        "a defect counts where nobody wants to look",
        ("test_what_lies_outside_is_neither_scored_nor_a_region",),
    ),
    Mutant(
        "scope-ignored", "inspected",
        "inside &= ~area.on(shape, covered)",
        "inside &= area.on(shape, covered)",
        "only what is to be ignored is inspected",
        ("test_ignored_places_are_taken_out_of_the_inspected_ones",),
    ),
    Mutant(
        "other-scope", "_calibration",
        "calibration.scope != manifest.scope(product).name",
        "False",
        "the threshold of other places applies",
        ("test_a_calibration_is_of_one_scope",),
    ),
)  # fmt: skip


@contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """A copy of the tree under the name its package has, with the shared folder beside it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder, "mdps")
        shutil.copytree(root, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (root.parent / "shared").is_dir():
            (tree.parent / "shared").symlink_to(root.parent / "shared")
        yield tree


@contextmanager
def broken(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The tree with the code changed, and what Python keeps of that file forgotten."""
    place = place_of(mutant, tree)
    text = place.file.read_bytes()
    kept = Path(cache_from_source(str(place.file)))
    try:
        kept.unlink(missing_ok=True)
        place.file.write_bytes(place.replaced(written(mutant)))
        yield
    finally:
        kept.unlink(missing_ok=True)
        place.file.write_bytes(text)


def judge(tests: Sequence[str], tree: Path) -> tuple[int | None, str]:
    """pytest's exit status and its output; None where it ran too long."""
    log = tree.parent / "log"
    context = get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=_pytest, args=([f"tests/{test_of(test, tree)}" for test in tests], tree, log))
    process.start()
    process.join(LONGEST)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None, log.read_text()
    return process.exitcode, log.read_text()


def _pytest(tests: list[str], tree: Path, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree.parent))
    sys.dont_write_bytecode = False  # whatever the environment says: the copy is compiled once
    os.environ |= {"PYTHONPATH": str(tree.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    import pytest

    import mdps

    assert Path(mdps.__file__).parent == tree, f"mdps is {mdps.__file__}, and not the copy"
    sys.exit(int(pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests])))


def outcome_of(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """ "killed" with the test that failed, or "survived" or "void" with what is to be said of it."""
    with broken(mutant, tree):
        status, output = judge(mutant.tests, tree)
    if status == 1 and (failed := re.search(r"^FAILED tests/\S+?::(\S+)", output, re.MULTILINE)):
        return "killed", failed[1]
    if status == 0:
        return "survived", "nothing"
    print(output[-3000:], file=sys.stderr)
    return "void", "no end" if status is None else BROKEN


HEAD = """# Mutations

Code of the method, of gates and of the server, each broken once, and the test that failed then.
`python tests/mutants.py --report docs/develop/mutations.md` (Linux) writes this; with names it replaces their rows
only. Only the tests named beside a mutation in `tests/mutants.py` ran, and they passed without the change.

| mutation | function | what is wrong then | outcome | by |
|---|---|---|---|---|
"""


def write_report(path: Path, outcomes: dict[str, tuple[str, str]]) -> None:
    """A row a mutant; of those that did not run now, the row that is there."""
    lines = path.read_text().splitlines() if path.is_file() else []
    known = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    for mutant in MUTANTS:
        if mutant.name in outcomes:
            outcome, by = outcomes[mutant.name]
            cells = (f"`{mutant.name}`", f"`{mutant.function}`", mutant.what, outcome, f"`{by}`")
            known[mutant.name] = f"| {' | '.join(cells)} |"
    path.write_text(HEAD + "".join(f"{known[m.name]}\n" for m in MUTANTS if m.name in known))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--report", type=Path)
    chosen = parser.parse_args()
    for name in set(chosen.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"there is no mutant {name}")
    mutants = [mutant for mutant in MUTANTS if not chosen.names or mutant.name in chosen.names]
    outcomes: dict[str, tuple[str, str]] = {}
    with copied() as tree:
        for mutant in mutants:  # all before the first: an hour is long to find that the last has moved
            place_of(mutant, tree)
        for mutant in mutants:
            outcomes[mutant.name] = outcome_of(mutant, tree)
            print(mutant.name, *outcomes[mutant.name], flush=True)
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        status, output = judge(tests, tree)
        if status != 0:
            print(output[-3000:], file=sys.stderr)
            raise SystemExit("the tests do not pass without a change, so that nothing of this counts")
    if chosen.report:
        write_report(chosen.report, outcomes)
    return int(any(outcome != "killed" for outcome, _ in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
