"""What a measurement depends on, recorded with it."""

import os
import platform
from typing import Any

from mdps.runtime.choice import cpu_model
from mdps.runtime.manifest import Manifest
from mdps.runtime.threads import available_cpus
from mdps.runtime.versions import installed

PACKAGES = ("mdps", "numpy", "onnxruntime", "onnxruntime-gpu", "openvino", "MNN", "torch", "timm", "anomalib")


def machine_facts(manifest: Manifest) -> dict[str, Any]:
    """Processor, cores, memory, load, versions, and which bundle with which settings; JSON values."""
    return {
        "cpu": cpu_model(),
        "cpus": available_cpus(),
        "cpus_of_host": os.cpu_count(),
        "memory_mb": _memory_mb(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": installed(*PACKAGES),
        "bundle": manifest.name,
        "bundle_sha256": manifest.files_sha256,
        "checkpoint_sha256": manifest.checkpoint.sha256,
        "parameters": manifest.network.get("parameters"),
        "image_size": list(manifest.preprocessing.network_size),
        "sampler": manifest.settings.sampler.to_json(),
    }


def _memory_mb() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6)
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
