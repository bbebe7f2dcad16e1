"""What a benchmark makes for itself, each once: other methods and sizes of the checkpoint, the one-file detector."""

from collections.abc import Callable
from pathlib import Path

from mdps.benchmarks.bench.competitor import missing
from mdps.benchmarks.bench.spec import SkippedError
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import Manifest


class Variations:
    """Kept in `folder`. Imports torch when the first one is asked for."""

    def __init__(
        self, manifest: Manifest, ckpt: Path | None, weights: Path | None, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._manifest, self._ckpt, self._weights, self._folder, self._say = manifest, ckpt, weights, folder, say
        self._made: dict[str | int | Path, Path | SkippedError] = {}

    def bundle(self, what: str | int) -> Path:
        """The bundle of a method by its name, or at a side of the image; SkippedError says why there is none."""
        return self._kept(what)

    def one_file(self, bundle: Path) -> Path:
        """That calibrated bundle as one ONNX file; SkippedError says why there is none."""
        return self._kept(bundle)

    def _kept(self, what: str | int | Path) -> Path:
        if what not in self._made:
            self._made[what] = self._make(what)
        found = self._made[what]
        if isinstance(found, SkippedError):
            raise found
        return found

    def _make(self, what: str | int | Path) -> Path | SkippedError:
        try:
            from mdps.benchmarks.bench.remade import Remaker

            remaker = Remaker(self._manifest, self._ckpt, self._weights, self._folder, self._say)
            if isinstance(what, Path):
                return remaker.one_file(what)
            return remaker.method(what) if isinstance(what, str) else remaker.size(what)
        except MdpsError as error:
            return SkippedError(str(error))
        except ModuleNotFoundError as error:
            return SkippedError(missing(error, "torch"))
