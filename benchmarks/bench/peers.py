"""Detectors of anomalib that a user might run instead, with random weights, which cost what trained ones cost."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mdps.benchmarks.bench import Outcome, SkippedError, Spec, Timer, forget_peak, observation, torch_timer
from mdps.runtime.manifest import Manifest

CORESET = 0.1
"""Share of the good images' patches PatchCore keeps: anomalib's default. Taken at random, which costs the same."""

Images = Iterator[Tensor]
"""Good images, one [1, 3, H, W] in [0, 1] at a time."""


class Peer:
    """A network of anomalib, fitted; its score means nothing here and is not given."""

    def __init__(self, spec: Spec, network: nn.Module, size: tuple[int, int], note: str) -> None:
        self.timer: Timer = torch_timer(spec.device)
        self._network = network
        images = [torch.from_numpy((observation(size, index) + 1) / 2) for index in range(spec.batch)]
        self._images = torch.stack(images).to(spec.device)
        self.facts: dict[str, Any] = {"note": note}

    @torch.inference_mode()
    def run(self) -> Outcome:
        """One inference: map and score."""
        self._network(self._images)
        return Outcome()


def open_peer(spec: Spec) -> Peer:
    """Builds and fits the peer; SkippedError for a name that is none of PEERS."""
    import anomalib

    if spec.variant not in PEERS:
        raise SkippedError(f"there is no peer {spec.variant!r}: choose among {', '.join(PEERS)}")
    torch.set_num_threads(spec.threads)
    torch.set_default_device(spec.device)
    torch.manual_seed(0)
    size = Manifest.read(spec.bundle).preprocessing.network_size
    with torch.inference_mode():
        network, note = PEERS[spec.variant](_images(spec, size), spec.device)
    peer = Peer(spec, network.eval(), size, "")
    fitted = "" if forget_peak() else ", memory with fitting"
    peer.facts["note"] = f"anomalib {anomalib.__version__}, random weights{note}{fitted}"
    return peer


def _images(spec: Spec, size: tuple[int, int]) -> Images:
    """`bank_images` images that are made up: the time does not depend on what they show."""
    for index in range(spec.bank_images):
        image = observation(size, 100 + index)
        yield torch.from_numpy((image + 1) / 2)[None].to(spec.device)


def _patchcore(images: Images, device: str) -> tuple[nn.Module, str]:
    from anomalib.models.image.patchcore.torch_model import PatchcoreModel

    network: Any = PatchcoreModel(layers=["layer2", "layer3"], pre_trained=False).to(device).train()
    network.feature_extractor.eval()
    kept, count = [], 0
    for image in images:
        patches: Tensor = network(image)
        kept.append(patches[torch.randperm(len(patches))[: max(1, round(CORESET * len(patches)))]].clone())
        network.embedding_store.clear()
        count += 1
    network.memory_bank = torch.cat(kept)
    return network, f", wide_resnet50_2, bank of {len(network.memory_bank):,} patches of {count} images"


def _padim(images: Images, device: str) -> tuple[nn.Module, str]:
    from anomalib.models.image.padim.torch_model import PadimModel

    network: Any = PadimModel(layers=["layer1", "layer2", "layer3"], pre_trained=False).to(device).train()
    network.feature_extractor.eval()
    count = sum(1 for image in images if network(image) is not None)
    network.fit()
    return network, f", resnet18, fitted on {count} images"


def _draem(images: Images, device: str) -> tuple[nn.Module, str]:
    from anomalib.models.image.draem.torch_model import DraemModel

    return DraemModel().to(device), ""


def _efficientad(images: Images, device: str) -> tuple[nn.Module, str]:
    from anomalib.models.image.efficient_ad.torch_model import EfficientAdModel

    network: Any = EfficientAdModel().to(device)
    for table in (network.mean_std, network.quantiles):  # at zero they count as unset, and inference does less
        for index, name in enumerate(table):
            table[name].data.fill_(float(index % 2) + 0.5)
    return network, ", small"


PEERS: dict[str, Callable[[Images, str], tuple[nn.Module, str]]] = {
    "patchcore": _patchcore,
    "draem": _draem,
    "padim": _padim,
    "efficientad": _efficientad,
}
