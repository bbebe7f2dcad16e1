"""Judge image files: `python predict.py bundle part.png other.png`."""

import sys

from mdps.runtime import MdpsError, load


def main(bundle: str, *images: str) -> None:
    with load(bundle) as detector:
        for image in images:
            result = detector(image)
            print(f"{image}: {result.verdict}, score {result.score:.4f}, threshold {result.threshold:.4f}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python predict.py BUNDLE IMAGE ..")
    try:
        main(*sys.argv[1:])
    except MdpsError as error:  # a sentence that says what is wrong, with which file, and what to do
        sys.exit(str(error))
