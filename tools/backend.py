"""setuptools' build, with archives that depend on the sources alone: two builds are equal to the byte."""

import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

EPOCH = int(os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800"))  # 1980, the first year that a wheel can name


def build_wheel(folder: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build the wheel, whose files setuptools sorts and dates by SOURCE_DATE_EPOCH."""
    return str(build_meta.build_wheel(folder, settings, metadata))


def build_sdist(folder: str, settings: Any = None) -> str:
    """Build the source archive, and write it anew without times and owners."""
    name = str(build_meta.build_sdist(folder, settings))
    path = Path(folder) / name
    with tarfile.open(path) as archive:
        members = [(_plain(one), archive.extractfile(one)) for one in sorted(archive, key=lambda one: one.name)]
        temporary = path.with_suffix(".new")
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile("", "wb", 9, raw, mtime=EPOCH) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member, content in members:
                new.addfile(member, content)
    temporary.replace(path)
    return name


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member with the rights that everybody's files have."""
    member.mtime, member.uid, member.gid, member.uname, member.gname = EPOCH, 0, 0, "", ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.pax_headers = {}
    return member
