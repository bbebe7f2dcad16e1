"""An engine that no export compared is compared at its first load: right, or refused in a sentence."""

import json
import shutil
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mdps.export import ExportOptions, export_bundle
from mdps.export.parity import ParityError
from mdps.models import oracle
from mdps.models.checkpoints import load_denoiser, save_denoiser
from mdps.models.oracle_setup import eps_of, oracle_of
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime import BackendError, load, reference
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.engines.openvino import OpenVinoSession, has_bfloat16
from mdps.runtime.errors import BackendWarning, BundleError, UsageError
from mdps.runtime.loading import choose_engine, open_graphs
from mdps.runtime.manifest import Manifest, hash_files
from mdps.runtime.reference import COMPARED, FILE_NAME, Output, Reference
from mdps.runtime.schedule import NoiseSchedule

library = pytest.importorskip("openvino")
needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(library.Core()), reason="this processor has no bfloat16: AMX and AVX512_BF16 are missing"
)
OPTIONS = ExportOptions(backbone="random_tiny", noise_level=198, steps=2)
ALONE = replace(OPTIONS, engines=("onnxruntime",))


def write_diffusers(folder: Path) -> Path:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    network = diffusers.UNet2DModel(
        sample_size=64, block_out_channels=(32, 64, 64, 64), layers_per_block=1, attention_head_dim=32,
        down_block_types=("DownBlock2D",) * 4, up_block_types=("UpBlock2D",) * 4,
    )  # fmt: skip
    network.save_pretrained(folder / "unet")
    diffusers.DDPMScheduler().save_pretrained(folder / "scheduler")
    return folder


def write_guided_diffusion(folder: Path) -> Path:
    """Without `resblock_updown`: it downsamples by a strided convolution."""
    torch.manual_seed(0)
    shape = {"channel_mult": (1, 1), "num_res_blocks": 1, "attention_factors": (2,), "num_heads": 2, "norm_groups": 4}
    network = UNet(UNetConfig(image_size=16, model_channels=16, resblock_updown=False, **shape)).eval()
    for parameter in network.parameters():  # its last layer begins as zeros
        parameter.data += 0.05 * torch.randn_like(parameter)
    save_denoiser(folder / "strided.safetensors", network, NoiseSchedule.linear(), "eps")
    return folder / "strided.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guided_diffusion(tmp_path_factory.mktemp("strided"))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as where OpenVINO is not installed."""
    return export_bundle(checkpoint, tmp_path_factory.mktemp("bundle") / "alone", ALONE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / reference.CACHE_NAME


@pytest.fixture
def wrong_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO as it is without our mend."""
    monkeypatch.setattr("mdps.runtime.engines.openvino._keep_weights_apart", lambda *_: None)


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The roles of each comparison that is made."""
    made: list[list[str]] = []
    errors = Reference.errors

    def counted(self: Reference, sessions: Any, manifest: Manifest, roles: Any, samples: int = 1) -> Any:
        made.append(list(roles))
        return errors(self, sessions, manifest, roles, samples)

    monkeypatch.setattr(Reference, "errors", counted)
    return made


def opened(bundle: Path, engine: str = "openvino", **options: Any) -> None:
    load(bundle, engine=engine, calibrated=False, threads=1, warm_up=False, **options).close()


def picture() -> NDArray[np.uint8]:
    return np.random.RandomState(0).randint(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("write", [write_diffusers, write_guided_diffusion])
def test_openvino_scores_a_network_of_strided_convolutions_as_onnxruntime_does(write: Any, tmp_path: Path) -> None:
    made = export_bundle(write(tmp_path), tmp_path / "bundle", OPTIONS)
    engines = {entry["engine"].partition(" ")[0] for entry in Manifest.read(made).parity[COMPARED]}
    assert engines == {"CPUExecutionProvider", "OpenVINO"}
    scores = []
    for backend in ("onnxruntime", "openvino"):
        with load(made, engine=backend, calibrated=False, threads=1) as detector:
            scores.append(detector(picture()).score)
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)


def test_a_bundle_made_without_an_engine_is_compared_when_that_first_loads_it(
    bundle: Path, comparisons: list[list[str]], cache: Path
) -> None:
    opened(bundle, "onnxruntime")
    assert not comparisons, "the export did that"
    opened(bundle)
    assert [sorted(roles) for roles in comparisons] == [["features", "guided_step", "score"]]
    opened(bundle)
    opened(bundle, samples=3)
    assert len(comparisons) == 1, "it was not remembered"
    (entry,) = json.loads(cache.read_text()).values()
    assert all(" on OpenVINO 20" in agreed for agreed in entry["agreed"])


def test_another_processor_or_release_is_compared_again(
    bundle: Path, comparisons: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(bundle)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "cpu_model", lambda: "another")
        opened(bundle)
        opened(bundle, "onnxruntime")  # which the export compared elsewhere
    assert len(comparisons) == 3
    with monkeypatch.context() as patch:
        patch.setattr(reference, "engine_versions", lambda: {"onnxruntime": "9"})
        opened(bundle, "onnxruntime")
    with monkeypatch.context() as patch:
        patch.setattr(reference, "__version__", "9")
        opened(bundle, "onnxruntime")
    assert len(comparisons) == 5
    opened(bundle)
    assert len(comparisons) == 5


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.usefixtures("wrong_library")
def test_a_library_that_computes_wrongly_is_refused_in_one_sentence(bundle: Path, samples: int, cache: Path) -> None:
    told = (
        r"^OpenVINO 20\S+ on CPU computes the guided_step of \S+alone otherwise than its export did, so it is not "
        r"used: \w+ is off by [\d.]+ of its size, and 0\.001 is allowed; choose another engine than openvino, or export"
    )
    for _ in range(2):
        with pytest.raises(BackendError, match=told) as caught:
            opened(bundle, samples=samples)
        assert "\n" not in str(caught.value)
    assert not cache.exists(), "what is wrong was remembered as right"
    opened(bundle, "onnxruntime")


@pytest.mark.usefixtures("wrong_library")
def test_auto_does_not_choose_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdps.runtime.choice.installed", lambda: ("onnxruntime", "openvino"))
    monkeypatch.setattr("mdps.runtime.choice.MEASURED_SECONDS", 0.05)
    with pytest.warns(BackendWarning, match="openvino is left out of the choice: .* otherwise than its export did"):
        assert choose_engine(Bundle.read(bundle), LoadOptions(engine="auto")).name == "onnxruntime"


@pytest.mark.parametrize("output", ["eps", "guidance_gradient", "anomaly_map", "observation_features_1"])
@pytest.mark.parametrize("change", [lambda x: x * 1.01, lambda x: x[..., ::-1], lambda x: x * np.nan])
def test_any_output_that_is_wrong_is_named(
    bundle: Path, output: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OpenVinoSession.run

    def wrong(self: OpenVinoSession, feeds: Any, outputs: Any = None) -> Any:
        found = run(self, feeds, outputs)
        return {name: change(array) if name == output else array for name, array in found.items()}

    monkeypatch.setattr(OpenVinoSession, "run", wrong)
    with pytest.raises(BackendError, match=f"used: {output} is off by "):
        opened(bundle)


@pytest.mark.usefixtures("wrong_library")
def test_the_export_names_the_engine_and_can_leave_it_out(checkpoint: Path, tmp_path: Path) -> None:
    told = r"no bundle was written: openvino off by [\d.]+ \(allowed 0\.0001\); .*--engines onnxruntime"
    with pytest.raises(ParityError, match=told):
        export_bundle(checkpoint, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BackendError, match="otherwise than its export"):
        opened(export_bundle(checkpoint, tmp_path / "out", ALONE))


def test_engines_that_cannot_be_compared_are_wrong_use(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engines in (("tensorrt",), ("openvino-bf16",)):
        with pytest.raises(UsageError, match=f"--engines has '{engines[0]}': choose of onnxruntime, openvino, mnn"):
            replace(OPTIONS, engines=engines)
    with pytest.raises(UsageError, match="--engines mnn needs --engine mnn"):
        export_bundle(checkpoint, tmp_path / "out", replace(OPTIONS, engines=("mnn",)))
    monkeypatch.setattr("mdps.export.bundle.installed", lambda: ("onnxruntime",))
    with pytest.raises(UsageError, match=r'--engines openvino: it is not installed: pip install "mdps\[openvino\]"'):
        export_bundle(checkpoint, tmp_path / "out", replace(OPTIONS, engines=("openvino",)))


def without_reference(bundle: Path, folder: Path) -> Path:
    shutil.copytree(bundle, folder)
    (folder / FILE_NAME).unlink()
    manifest = Manifest.read(folder, verify=False)
    replace(manifest, files=hash_files(folder), parity={}).write(folder)
    return folder


def test_a_bundle_from_before_loads_with_a_warning_on_an_engine_its_export_did_not_have(
    bundle: Path, tmp_path: Path
) -> None:
    older = without_reference(bundle, tmp_path / "older")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(older, "onnxruntime")
    with pytest.warns(BackendWarning, match=r"older was exported before .* openvino computes what its export did"):
        opened(older)


def test_where_nothing_can_be_remembered_it_is_compared_each_time(
    bundle: Path, tmp_path: Path, comparisons: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        opened(bundle)
    assert len(comparisons) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"%s": 3}', b'{"%s": {"agreed": [[]]}}'])
def test_a_damaged_memory_is_made_anew(bundle: Path, content: bytes, cache: Path, comparisons: list[list[str]]) -> None:
    opened(bundle)
    (key,) = json.loads(cache.read_bytes())
    cache.write_bytes(content.replace(b"%s", key.encode()))
    opened(bundle)
    assert len(comparisons) == 2
    opened(bundle)
    assert len(comparisons) == 2


def test_what_a_manifest_says_of_comparisons_need_not_be_right(
    bundle: Path, tmp_path: Path, comparisons: list[list[str]]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle, folder)
    manifest = Manifest.read(folder)
    for odd in (3, [3], [{"role": []}], {}):
        replace(manifest, parity={COMPARED: odd}).write(folder)
        opened(folder, "onnxruntime")
    assert len(comparisons) == 1  # then it is remembered


def test_a_damaged_reference_is_a_sentence(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle, folder)
    manifest = Manifest.read(folder)
    for content, told in (("{", "cannot be read"), ("{}", "lacks the key 'seed'")):
        (folder / FILE_NAME).write_text(content)
        replace(manifest, files=hash_files(folder)).write(folder)
        with pytest.raises(BundleError, match=rf"reference\.json.* {told}"):
            opened(folder)


def test_the_reference_is_what_torch_computes(bundle: Path, checkpoint: Path) -> None:
    """Eps by the network's own forward, the gradient by autograd, of the inputs that a load draws again."""
    manifest, denoiser = Manifest.read(bundle), load_denoiser(checkpoint)
    stored = Reference.read(bundle, manifest)
    assert stored is not None
    scalars = stored.scalars["guided_step"]
    runs = reference._Runs(0, stored.scalars, (16, 16), manifest.settings.mask, {}, samples=1)
    x, y = (torch.from_numpy(np.asarray(runs._step("guided_step")[name])) for name in ("x_t", "observation"))
    eps = eps_of(denoiser.network, denoiser.prediction, denoiser.schedule)
    setup = oracle_of(manifest.settings, manifest.schedule.betas, 0)
    e, gradient = oracle.guidance_gradient(eps, x, y, int(scalars["timestep"]), scalars["alpha_t"], setup)
    for name, wanted in (("eps", e), ("guidance_gradient", gradient)):
        assert stored.outputs["guided_step"][name].error(wanted.numpy()) < 1e-4
        assert stored.outputs["guided_step"][name].error(wanted.numpy() * 1.001) > 5e-4


def test_the_inputs_never_change() -> None:
    """Golden numbers: a bundle's reference is of these inputs, in every release."""
    runs = reference._Runs(0, {}, (16, 24), None, {}, samples=1)  # type: ignore[arg-type]
    np.testing.assert_allclose(runs._picture[0, :, 5, 7], GOLDEN_PICTURE, rtol=1e-6)
    np.testing.assert_allclose(runs._noise(1)[0, 1, 2, :3], GOLDEN_NOISE, rtol=1e-6)


GOLDEN_PICTURE = (0.47532055, -0.58927691, -0.70176363)
GOLDEN_NOISE = (0.64559376, -0.31623152, 0.26975071)


@needs_bfloat16
def test_steps_in_bfloat16_have_a_tolerance_of_their_own(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(bundle, "openvino-bf16")
    (entry,) = json.loads(cache.read_text()).values()
    assert {name for name in entry["agreed"] if name.endswith(" in bf16")} == {
        name for name in entry["agreed"] if name.startswith("guided_step")
    }
    cache.unlink()
    run = OpenVinoSession.run
    monkeypatch.setattr(OpenVinoSession, "run", lambda *given: {k: 1.3 * v for k, v in run(*given).items()})
    with pytest.raises(BackendError, match=r"in bf16 computes the guided_step .* and 0\.2 is allowed"):
        opened(bundle, "openvino-bf16")


def test_files_of_mnn_are_compared_with_the_same_reference(
    checkpoint: Path, tmp_path: Path, comparisons: list[list[str]]
) -> None:
    pytest.importorskip("MNN")
    made = export_bundle(checkpoint, tmp_path / "mnn", replace(ALONE, engine="mnn"))
    comparisons.clear()
    opened(made, "mnn")
    assert comparisons == [["guided_step"]], "onnxruntime computes the others, and the export has compared that"


def test_errors_show_in_a_value_and_in_the_norm() -> None:
    array = np.random.RandomState(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    output = Output.of(array)
    assert output.error(array) < 1e-8
    elsewhere = ~np.isin(array, np.asarray(output.values, np.float32))
    assert elsewhere.mean() > 0.9
    assert output.error(np.where(elsewhere, 1.1 * array, array)) > 0.05, "the values alone do not see it"
    assert output.error(np.roll(array, 1)) > 0.1, "the norm alone does not see it"
    assert np.isnan(output.error(np.where(array > 2, np.nan, array)))
    assert Output.from_json(json.loads(json.dumps(output.to_json()))) == output


def test_the_reference_is_small(bundle: Path) -> None:
    assert (bundle / FILE_NAME).stat().st_size < 12_000


def test_a_graph_that_torch_runs_is_compared_too(checkpoint: Path, tmp_path: Path) -> None:
    made = export_bundle(checkpoint, tmp_path / "traced", replace(ALONE, guidance_backend="traced"))
    manifest = Manifest.read(made)
    (entry,) = (one for one in manifest.parity[COMPARED] if one["role"] == "guided_step")
    assert entry["engine"].startswith(f"torch {torch.__version__}")
    stored = Reference.read(made, manifest)
    assert stored is not None
    with ExitStack() as stack:
        sessions = open_graphs(Bundle.read(made), stack).roles
        found = stored.errors(sessions, manifest, ["guided_step"], samples=2)
    assert found["guided_step"][1] < 1e-5
