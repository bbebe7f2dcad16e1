"""The loop on a card, on a fake one: its numbers against `Pipeline`, and in which order it asks for what."""

import shutil
import threading
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.calibration import exit_limit
from mdps.runtime.detector import Detector
from mdps.runtime.device.pipeline import DevicePipeline, check_settings
from mdps.runtime.errors import BackendError, BackendWarning, CalibrationError, UsageError
from mdps.runtime.graphs import Graphs
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import NoiseBank
from mdps.runtime.schedule import Step

ARRAYS = (
    "anomaly_map", "anomaly_score", "mask", "first_map", "first_score", "posterior_samples", "early_exit",
)  # fmt: skip
RANGE = (0.0, 6.0)


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(line_bundle, fake_card, opened):
    """A Pipeline and a DevicePipeline of the same graphs, with the fake driver and its engines."""
    return lambda **how: make_pair(line_bundle, fake_card, opened, **how)


def make_pair(
    bundle, fake_card, opened, change=lambda s: s, samples=1, max_batch=8, largest=None, driver=None, captures=True
):
    manifest = Manifest.read(bundle)
    settings = change(LoadOptions(samples=samples).override(manifest.settings))
    # As many images at once as on the card, as the last digits depend on that.
    pipeline = open_pipeline(Bundle(bundle, manifest, settings), opened, threads=1, max_batch=max_batch)
    pipeline = replace(pipeline, at_once=max(1, max_batch // samples))
    driver = driver or fake_card.FakeDriver()
    with driver.current():
        stream = driver.stream()
    roles = ("guided_step", "plain_step", "features", "score")
    engines = {
        role: fake_card.FakeEngine(driver, bundle / manifest.graphs[role].file, (largest or {}).get(role), captures)
        for role in roles
    }
    noise = NoiseBank.of(settings.sampler, manifest.preprocessing.network_size)
    on_card = DevicePipeline(
        driver, stream, Graphs(*engines.values()), manifest.schedule, settings, noise, max_batch
    )  # fmt: skip
    return SimpleNamespace(
        pipeline=pipeline, device=on_card, driver=driver, engines=SimpleNamespace(**engines), manifest=manifest
    )


def pictures(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (count, 3, 16, 16)).astype(np.float32)


def same(found, wanted, atol=0.0):
    for name in ARRAYS:
        have, want = getattr(found, name), getattr(wanted, name)
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=0, atol=atol, err_msg=name)
    assert found.times.keys() == wanted.times.keys()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize(("samples", "images"), [(1, 1), (1, 5), (3, 1), (3, 2)])
def test_it_finds_what_the_pipeline_finds(pair, fake_card, samples, images, captures, eager):
    both = pair(samples=samples, driver=fake_card.FakeDriver(captures=captures, eager=eager))
    y = pictures(images)
    for _ in range(2):  # the second time from graphs, over what the first one left in the buffers
        same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE))
    np.testing.assert_array_equal(both.device.first_maps(y), both.pipeline.first_maps(y))
    assert bool(both.driver.graphs) == captures


@pytest.mark.parametrize("rows", [8, 3])
def test_the_first_pass_guides_and_noises_come_in_pairs_as_in_the_pipeline(pair, rows):
    def change(settings):
        sampler = settings.sampler
        masked = replace(sampler.masked_pass, target="previous", noise_level=99, steps=1)
        return replace(settings, sampler=replace(sampler, masked_pass=masked, antithetic=True))

    both = pair(change=change, samples=4, largest={"guided_step": {"x_t": (rows, 3, 16, 16)}})
    found, wanted = both.device.inspect(pictures(3), RANGE), both.pipeline.inspect(pictures(3), RANGE)
    same(found, wanted, atol=2e-5)
    other = pair(change=lambda s: replace(change(s), sampler=replace(change(s).sampler, antithetic=False)), samples=4)
    assert np.abs(other.pipeline.inspect(pictures(3), RANGE).posterior_samples - wanted.posterior_samples).max() > 1e-2


@pytest.mark.parametrize("rows", [8, 2])
def test_it_sees_the_noise_that_the_pipeline_sees(pair, rows):
    both = pair(largest={"guided_step": {"x_t": (rows, 3, 16, 16)}})
    step = Step(99.0, 0.7, 0.6, 0.1)
    y = pictures(3)
    wanted = both.pipeline.predicted_noise(y, step)
    np.testing.assert_allclose(both.device.predicted_noise(y, step), wanted, rtol=0, atol=2e-5)
    same(both.device.inspect(y[:1], RANGE), both.pipeline.inspect(y[:1], RANGE))  # whose buffers it shares
    np.testing.assert_allclose(both.device.predicted_noise(y, step), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("eager", [False, True])
def test_many_images_go_in_parts_whose_uploads_run_ahead(pair, fake_card, eager):
    """Seven images by two: four parts, of which the last is smaller."""
    both = pair(max_batch=2, driver=fake_card.FakeDriver(eager=eager))
    y = pictures(7)
    for _ in range(2):
        same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE))


def test_the_next_images_go_up_before_what_was_found_comes_down(pair):
    both = pair(max_batch=1)
    both.device.inspect(pictures(1), RANGE)  # allocates, compiles, records
    both.driver.asked.clear()
    both.device.inspect(pictures(3), RANGE)
    words = [word for word in both.driver.asked if word in ("upload", "launch", "download", "finish")]
    stages = ["launch"] * 5
    free, result = ["finish"], ["finish"]
    up = [*free, "upload"]
    assert words == [
        *up, *stages, *up, "download", *stages, *up, "download", *result, *stages, "download", *result, *result,
    ]  # fmt: skip


@pytest.mark.parametrize(("samples", "rows"), [(1, 2), (3, 2), (3, 4), (5, 3)])
def test_more_samples_than_a_plan_takes_go_in_chunks(pair, samples, rows):
    largest = {role: {"x_t": (rows, 3, 16, 16)} for role in ("guided_step", "plain_step")}
    both = pair(samples=samples, max_batch=2 * samples, largest=largest)
    y = pictures(2)
    for _ in range(2):
        same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE), atol=2e-5)
    assert {binding["x_t"].shape[0] for binding in both.engines.guided_step.bindings} <= set(range(1, rows + 1))


def with_noise(settings):
    return replace(settings, sampler=replace(settings.sampler, eta_ddim=1.0))


def replacing(settings):
    return replace(settings, sampler=replace(settings.sampler, mask_rule="replace", eta_ddim=0.5))


def one_pass(settings):
    return replace(settings, sampler=replace(settings.sampler, masked_pass=None))


def plain_first(settings):
    sampler = settings.sampler
    return replace(settings, sampler=replace(sampler, first_pass=replace(sampler.first_pass, guidance_scale=0.0)))


def without_noise(settings):
    return replace(settings, sampler=replace(settings.sampler, eta_ddim=0.0))


@pytest.mark.parametrize("change", [with_noise, without_noise, one_pass, plain_first])
def test_other_settings_of_the_sampler(pair, change):
    both = pair(samples=3, max_batch=6, change=change)
    y = pictures(2)
    for _ in range(2):
        same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE))


def test_the_replace_rule_keeps_its_noise(line_bundle, tmp_path, fake_card, opened):
    """Step graphs that put noise in by the mask, in chunks that begin in the middle of an image's samples."""
    bundle = shutil.copytree(line_bundle, tmp_path / "replace")
    manifest = Manifest.read(bundle)
    for role in ("guided_step", "plain_step"):
        model = onnx.load(bundle / manifest.graphs[role].file, load_external_data=False)
        graph = model.graph
        graph.input.append(onnx.helper.make_tensor_value_info("mask_noise", 1, ["batch", 3, 16, 16]))
        (last,) = [node for node in graph.node if "x_s" in node.output]
        last.output[list(last.output).index("x_s")] = "x_s_before"
        graph.node.append(onnx.helper.make_node("Add", ["x_s_before", "mask_noise"], ["x_s"]))
        onnx.save(model, bundle / manifest.graphs[role].file)
    (bundle / "manifest.json").write_text(_rehashed(bundle))
    largest = {role: {"x_t": (2, 3, 16, 16)} for role in ("guided_step", "plain_step")}
    both = make_pair(bundle, fake_card, opened, change=replacing, samples=3, max_batch=6, largest=largest)
    y = pictures(2)
    same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE), atol=1e-4)


def _rehashed(bundle):
    import json

    from mdps.runtime.manifest import FileEntry

    obj = json.loads((bundle / "manifest.json").read_text())
    obj["files"] = {name: FileEntry.of(bundle / name).to_json() for name in obj["files"]}
    return json.dumps(obj)


def exits(both, y):
    """A limit that about half of the images leave at, and what the pipeline finds with it."""
    limit = float(np.median(both.pipeline.inspect(y, RANGE).first_score))
    return limit, both.pipeline.inspect(y, RANGE, limit)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("eager", [False, True])
def test_an_early_exit_leaves_what_the_first_pass_found(pair, fake_card, max_batch, eager):
    both = pair(max_batch=max_batch, driver=fake_card.FakeDriver(eager=eager))
    y = pictures(6)
    limit, wanted = exits(both, y)
    assert 0 < wanted.early_exit.sum() < 6
    for _ in range(2):
        same(both.device.inspect(y, RANGE, limit), wanted, atol=2e-5)
        same(both.device.inspect(y, RANGE, -1.0), both.pipeline.inspect(y, RANGE, -1.0))
        same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE))


def test_images_that_all_leave_cost_no_masked_pass(pair):
    both = pair()
    y = pictures(3)
    found = both.device.inspect(y, RANGE, np.inf)
    assert found.early_exit.all()
    assert found.times["masked_pass"] == 0
    same(found, both.pipeline.inspect(y, RANGE, np.inf))
    before = both.engines.guided_step.runs
    both.device.inspect(y, RANGE, np.inf)
    steps = len(both.device._passes[0].steps)
    assert both.engines.guided_step.runs == before + steps


def test_an_exit_without_a_masked_pass(pair):
    both = pair(change=one_pass)
    y = pictures(4)
    limit, wanted = exits(both, y)
    same(both.device.inspect(y, RANGE, limit), wanted)


def test_memory_is_allocated_and_work_recorded_once_a_batch_size(pair):
    both = pair(max_batch=4)
    for count in (1, 4, 2):
        both.device.inspect(pictures(count), RANGE)
    had = (len(both.driver.blocks), len(both.driver.pinned_sizes), len(both.driver.graphs), len(both.driver.streams))
    bindings = {role: len(engine.bindings) for role, engine in vars(both.engines).items()}
    assert had[2] == 3 * 5  # features, pass, score, pass, score of three batch sizes
    assert bindings == {"guided_step": 3, "plain_step": 0, "features": 3, "score": 3}
    runs = both.engines.guided_step.runs
    for seed in range(3):
        both.device.inspect(pictures(7, seed), RANGE)
        both.device.first_maps(pictures(2, seed))
        both.device.inspect(pictures(1, seed), RANGE, 0.0)
    now = (len(both.driver.blocks), len(both.driver.pinned_sizes), len(both.driver.graphs), len(both.driver.streams))
    new = {3}  # of seven images three are left after four: one more size, once
    assert now == (had[0] + _buffers_of_a_size(both), had[1] + 4 * len(new), had[2] + 5, had[3])
    assert both.engines.guided_step.runs > runs


def _buffers_of_a_size(both):
    """Work, landing, results; outputs of features and score; those of a step's binding with its scalars."""
    outputs = len(both.engines.features.outputs) + len(both.engines.score.outputs)
    guided = both.engines.guided_step
    step = 1 + sum(1 for port in (*guided.inputs, *guided.outputs) if port.shape)
    return 3 + outputs + step


def test_only_staging_goes_up_and_only_results_come_down(pair):
    both = pair(samples=3, max_batch=6)
    y = pictures(2)
    both.device.inspect(y, RANGE)
    both.driver.asked.clear()
    both.device.inspect(y, RANGE)
    assert both.driver.asked.count("upload") == both.driver.asked.count("download") == 1
    assert both.driver.asked.count("launch") == 5
    assert "engine" not in both.driver.asked  # they are in the graphs


def test_an_engine_that_cannot_be_recorded_is_asked_every_time(line_bundle, fake_card, opened):
    both = make_pair(line_bundle, fake_card, opened, captures=False)
    y = pictures(1)
    both.device.inspect(y, RANGE)
    both.driver.asked.clear()
    both.device.inspect(y, RANGE)
    assert not both.driver.graphs
    assert both.driver.asked.count("engine") == 2 * len(both.device._passes[0].steps) + 3


def test_a_card_that_refuses_to_record_is_warned_of_and_still_used(pair, fake_card):
    driver = fake_card.FakeDriver()
    driver.refuses_capture = True
    both = pair(driver=driver)
    y = pictures(1)
    with pytest.warns(BackendWarning, match="could not be recorded as a CUDA graph .*does not like it"):
        found = both.device.inspect(y, RANGE)
    same(found, both.pipeline.inspect(y, RANGE))
    same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE))  # and is not warned of again
    assert not driver.graphs or not driver.launches


def test_a_detector_works_in_other_threads_than_it_was_loaded_in(pair, line_bundle):
    both = pair()
    with Detector(both.manifest, both.device, both.manifest.calibrations["default"], engine="tensorrt-rtx") as detector:
        detector.warm_up()
        y, found, faults = pictures(3), [], []

        def work():
            try:
                found.append(detector.inspect(y, mask_range=RANGE))
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert not faults
        for one in found:
            same(one, both.pipeline.inspect(y, RANGE))
        assert detector.provenance["engine"] == "tensorrt-rtx"
        assert detector.provenance["engines"]["guided_step"] == "fake guided_step"


def test_a_calibrated_exit_through_a_detector(pair):
    both = pair()
    calibration = both.manifest.calibrations["default"]
    on_card, on_cpu = (Detector(both.manifest, p, calibration) for p in (both.device, both.pipeline))
    assert exit_limit(calibration, 0.0, "x") is None
    pixels = np.random.default_rng(3).integers(0, 256, (5, 24, 24, 3), dtype=np.uint8)
    for have, want in zip(on_card.batch(list(pixels)), on_cpu.batch(list(pixels)), strict=True):
        assert (have.score, have.verdict) == (want.score, want.verdict)
        np.testing.assert_array_equal(have.anomaly_map, want.anomaly_map)


def test_what_was_closed_says_so_and_can_be_closed_again(pair):
    both = pair()
    both.device.inspect(pictures(1), RANGE)
    both.device.close()
    both.device.close()
    assert both.driver.closed
    assert all(engine.closed for engine in vars(both.engines).values())
    with pytest.raises(BackendError, match="was closed: load the bundle again"):
        both.device.inspect(pictures(1), RANGE)


def test_a_number_that_is_none_is_no_verdict(pair):
    both = pair(max_batch=2)
    real = both.engines.score.session

    class Broken:
        def run(self, names, feeds):
            values = real.run(names, feeds)
            if np.array_equal(feeds["observation"][-1], y[2]):
                values[0][-1, 0, 3, 3] = np.nan
            return values

    y = pictures(5)
    both.engines.score.session = Broken()
    with pytest.raises(BackendError, match="NaN or infinite values for image 2 of the batch"):
        both.device.inspect(y[:3], RANGE)
    both.engines.score.session = real
    same(both.device.inspect(y, RANGE), both.pipeline.inspect(y, RANGE))


def test_a_frozen_range_that_is_not_known_is_refused(pair):
    both = pair(change=lambda settings: replace(settings, mask=replace(settings.mask, range="frozen")))
    with pytest.raises(CalibrationError, match="mdps calibrate"):
        both.device.inspect(pictures(1), None)


def test_a_full_card_says_so(pair, fake_card):
    both = pair(driver=fake_card.FakeDriver(memory=2**19))
    with pytest.raises(BackendError, match="has no room"):
        both.device.inspect(pictures(8), RANGE)


def test_a_plan_for_fewer_samples_is_named(pair):
    with pytest.raises(BackendError, match="at most 2 samples an image, not 3: export again with --samples 3"):
        pair(samples=3, largest={"score": {"posterior_samples": (8, 2, 3, 16, 16)}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: replace(s, masked_pass=replace(s.masked_pass, start="stitched")), r"masked_pass\.start 'stitched'"),
        (lambda s: replace(s, first_pass=replace(s.first_pass, resamples=3)), r"first_pass\.resamples 3"),
        (lambda s: replace(s, mask_rule="inpaint"), "mask_rule 'inpaint'"),
    ],
)
def test_what_the_loop_on_a_card_cannot_do_is_refused(line_bundle, change, words):
    settings = Manifest.read(line_bundle).settings
    with pytest.raises(UsageError, match=rf"{words}.*: use the engine onnxruntime"):
        check_settings(replace(settings, sampler=change(settings.sampler)))
