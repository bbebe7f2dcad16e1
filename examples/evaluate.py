"""Measure a detector on your own parts: `python evaluate.py bundle good/ bad/`, two folders of PNG files."""

import sys
from pathlib import Path

from mdps.benchmarks.metrics import auroc
from mdps.runtime import MdpsError, load


def main(bundle: str, good: str, bad: str) -> None:
    with load(bundle) as detector:
        of_good, of_bad = ([detector(path) for path in sorted(Path(folder).glob("*.png"))] for folder in (good, bad))
    labels = [False] * len(of_good) + [True] * len(of_bad)
    print(f"AUROC {auroc(labels, [result.score for result in (*of_good, *of_bad)]):.3f}")
    print(f"good parts that fail: {sum(result.verdict == 'fail' for result in of_good)} of {len(of_good)}")
    print(f"bad parts that pass: {sum(result.verdict == 'pass' for result in of_bad)} of {len(of_bad)}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python evaluate.py BUNDLE GOOD_FOLDER BAD_FOLDER")
    try:
        main(*sys.argv[1:])
    except MdpsError as error:
        sys.exit(str(error))
