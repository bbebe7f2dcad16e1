"""From an empty environment to a verdict: `python tests/project/first_verdict.py` builds mdps, installs it and judges.

It prints what a newcomer waits for and what then lies on the disk. The two commands are `pip install` and `python`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "tests", "out", "runs", "__pycache__", "*.egg-info", "demo-report"
)
NOT_OURS = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
THREE_LINES = 'import mdps\ndetector = mdps.demo_detector()\nprint(detector(mdps.demo_picture("bad")))'


class Lean:
    """A virtual environment with nothing but the wheel, made of the source archive, and its extra [cpu].

    `seconds` and `processor_seconds` are what the installation and the three lines took, the wheel's build aside.
    """

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        wheel = build(folder)
        started, before = time.perf_counter(), os.times()
        self.python("-m", "pip", "install", "--quiet", f"{wheel}[cpu]", "-c", str(ROOT / "constraints.txt"))
        self.verdict = self.python("-c", THREE_LINES).strip()
        self.seconds = time.perf_counter() - started
        self.processor_seconds = sum(os.times()[2:4]) - sum(before[2:4])

    def python(self, *arguments: str) -> str:
        """Runs Python there, away from the checkout, and gives what it printed."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.bin / "python"), *arguments],
            cwd=self.bin,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def installed(self) -> set[str]:
        """Names of the packages there."""
        return {item["name"] for item in json.loads(self.python("-m", "pip", "list", "--format", "json"))}

    def megabytes(self) -> float:
        """All that was installed, with what Python compiled of it."""
        top = Path(self.python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        ours = [path for path in top.iterdir() if not path.name.startswith(NOT_OURS)]
        files = [file for path in ours for file in (path.rglob("*") if path.is_dir() else [path])]
        return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink()) / 1e6


def build(folder: Path) -> Path:
    """Return the wheel of the source archive of a copy: a build leaves folders in the tree that it builds from."""
    shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT, symlinks=True)
    command = [sys.executable, "-m", "build", "--no-isolation", str(folder / "tree")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "tree" / "dist").glob("*.whl")
    return wheel


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        lean = Lean(Path(work))
        print(f"{lean.verdict}\n{lean.seconds:.0f} s, of a processor {lean.processor_seconds:.0f} s")
        print(f"{lean.megabytes():.0f} MB: {', '.join(sorted(lean.installed()))}")
