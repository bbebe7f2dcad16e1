"""`python -m mdps.benchmarks.gpu_check`: the command `mdps gpu-check`."""

import sys

from mdps.benchmarks.gpu_check.command import gpu_check
from mdps.serving.terminal import run

if __name__ == "__main__":
    sys.exit(run(gpu_check, name="mdps gpu-check"))
