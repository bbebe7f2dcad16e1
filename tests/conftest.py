"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with golden numbers and real data: `MDPS_SHARED`, or `shared` beside the checkout."""
    folder = Path(os.environ.get("MDPS_SHARED", ROOT.parent / "shared"))
    if not (folder / "golden").is_dir():
        reason = "no shared folder: set MDPS_SHARED to the folder that holds golden/ and data/"
        if os.environ.get("MDPS_CI"):  # a run that decides must not pass because its proof was missing
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
