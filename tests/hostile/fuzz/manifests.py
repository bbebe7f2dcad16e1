"""Target `manifest`: what `Manifest.read` and `load` make of a manifest.json beside the graphs of a good bundle."""

import json
import os
import shutil
from pathlib import Path
from random import Random

import numpy as np
import trees
from engine import Case

from mdps.runtime import load
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import FILE_NAME, Manifest

_WORK = 64  # steps of one image that are run


class Manifests:
    """`bundle` is a calibrated bundle."""

    refusals = (MdpsError,)

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._text = (bundle / FILE_NAME).read_bytes()

    def start(self, folder: Path) -> None:
        for file in self._bundle.iterdir():
            if file.name != FILE_NAME:
                shutil.copy(file, folder / file.name)
        (folder / "a folder").mkdir()
        os.mkfifo(folder / "a pipe")
        (folder / "a link").symlink_to("/etc/hostname")

    def seeds(self) -> list[Case]:
        tree = json.loads(self._text)
        older = json.loads(self._text) | {"schema_version": 2}
        del older["settings"]["sampler"]["early_exit"]
        named = json.loads(self._text)
        for name in ("a folder", "a pipe", "a link"):
            named["files"][name] = {"sha256": "0" * 64, "bytes": 0}
        given = json.loads(self._text) | {
            "schedule": {"kind": "given", "betas": [0.001 * (1 + n % 9) for n in range(200)]}
        }
        reference = json.loads(self._text)
        reference["settings"]["sampler"] |= {"time_index": "reference", "mask_rule": "replace"}
        for name in ("first_pass", "masked_pass"):
            reference["settings"]["sampler"][name] |= {"steps": None, "skip": 50}
        all_of = (tree, older, named, given, reference)
        return [{"manifest": json.dumps(each, indent=1).encode()} for each in all_of]

    def mutated(self, case: Case, random: Random) -> Case:
        text = case["manifest"]
        if random.random() < 0.12:
            return {"manifest": trees.garbled(text, random)}
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            return {"manifest": trees.garbled(text, random)}
        return {"manifest": trees.written(trees.mutated(tree, random), random)}

    def run(self, case: Case, folder: Path) -> None:
        (folder / FILE_NAME).write_bytes(case["manifest"])
        manifest = Manifest.read(folder)
        assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
        sampler = manifest.settings.sampler
        work = sum((one.steps or one.noise_level) * one.resamples for one in sampler.passes) * sampler.samples
        detector = load(folder, threads=1, warm_up=work <= _WORK)
        with detector:
            if work <= _WORK:
                result = detector(np.full((20, 20, 3), 90, np.uint8))
                assert np.isfinite(result.anomaly_map).all()
