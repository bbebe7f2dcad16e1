"""Moves pictures to where the reference view shows the part, and makes that view of images of good parts.

A move is rigid. It is sought by phase correlation (Kuglin and Hines 1975) under several turns, and made exact by the
enhanced correlation coefficient (Evangelidis and Psarakis 2008). OpenCV is imported when something is to be aligned.
"""

import base64
import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.alignment import NARROWEST, SIDE, Alignment, Matrix, Pose, moved_by
from mdps.runtime.calibration import CalibrationWarning
from mdps.runtime.errors import CalibrationError, ImageError, UsageError, refuse_unreadable
from mdps.runtime.pictures import read_image
from mdps.runtime.preprocessing import Picture

if TYPE_CHECKING:
    from PIL import Image

FARTHEST, MOST_TURN = 0.1, 10.0  # of a side; degrees
TURNS = range(-12, 13, 2)  # degrees that the search begins with
COARSE = 4  # times smaller than the reference view, there
SLIGHTLY, CLEARLY = (
    0.99,
    0.75,
)  # of the residual: a shift, a turn that leaves more is not made; a round part has no turn
FLAT = 1.0  # grey levels: of a smaller deviation nothing can be seen
ASPECT = 1.02  # aspects nearer than that are the same
WORST, MARGIN = 0.95, 5.0  # quantile of good parts' residuals, and how many times that a picture may leave
ALIKE = 1.5  # times the least residual: nearly as good
FLOOR, CEILING = 0.02, 0.5  # of the limit: above its ceiling two pictures are not of one kind of part
BLUR = 4.0  # pixels of the reference view, over which a difference at a picture's edge is evened out
LEAST = 0.5  # of the reference that a moved picture must cover
CANDIDATES, MOST = 8, 200  # good images that may become the reference, and that tell the limit

Pixels = NDArray[np.uint8]
Size = tuple[int, int]
T = TypeVar("T")


def opencv() -> Any:
    """Return OpenCV; UsageError where it is not installed."""
    try:
        import cv2
    except ImportError:
        raise UsageError("parts are aligned by OpenCV, which is not installed: pip install 'mdps[align]'") from None
    return cv2


class Aligner:
    """Moves pictures of a product to where its reference view shows the part. UsageError without OpenCV."""

    def __init__(self, alignment: Alignment) -> None:
        self._limit, self._view = alignment.limit, alignment.pixels
        self._reference = Reference(grey(self._view))

    def __call__(self, picture: "Image.Image") -> tuple["Image.Image", Pose]:
        """Return the upright RGB picture as the reference view lies, and how it lay.

        What comes into view is the reference's, as bright as the picture's edge. ImageError where OpenCV refuses it.
        """
        from PIL import Image

        small = reduced(picture, self._reference.size)
        pose = self._pose(picture.size, small)
        if not pose.moved:
            return picture, pose
        ground = Image.fromarray(self._ground(small, pose)).resize(picture.size, Image.Resampling.BILINEAR)
        return Image.fromarray(self._reference.warped(np.asarray(picture), pose.matrix, np.array(ground))), pose

    def pose(self, picture: "Image.Image") -> Pose:
        """Return how the part lies in an upright picture."""
        return self._pose(picture.size, reduced(picture, self._reference.size))

    def _ground(self, small: Pixels, pose: Pose) -> Pixels:
        """Return the reference view with what differs at the edge of a reduced picture going on beyond it.

        A picture's edge alone would go on as streaks, which look like defects, and so would a step of brightness.
        """
        matrix = pose.at(self._reference.size).matrix
        there = self._reference.warped(self._view, np.linalg.inv(matrix))
        one, other = (self._reference.warped(pixels, matrix).astype(np.float32) for pixels in (small, there))
        ground: Pixels = np.rint(np.clip(self._view + self._reference.blurred(one - other), 0, 255)).astype(np.uint8)
        return ground

    def _pose(self, size: Size, small: Pixels) -> Pose:
        width, height = self._reference.size
        if not 1 / ASPECT < size[0] * height / (size[1] * width) < ASPECT:
            return _failed(size, f"it has {size[0]} x {size[1]} pixels, another aspect than the reference view")
        found = self._reference.find(grey(small))
        if found is None:
            return _failed(size, "nothing in it is like the reference view")
        fault = self.fault(found)
        if fault:
            return _failed(size, fault, found.residual)
        return found.at(size)

    def fault(self, found: Pose) -> str:
        """Return why this is not to be believed; empty where it is."""
        if found.residual is None or found.residual > self._limit:
            return f"moved it still differs by {found.residual:.3f}, where good parts do by {self._limit:.3f} at most"
        shift = max(abs(one) / side for one, side in zip(found.shift, found.size, strict=True))
        if shift > FARTHEST:
            return f"it is shifted by {shift:.0%}, more than {FARTHEST:.0%}"
        return (
            f"it is turned by {found.turn:.0f} degrees, more than {MOST_TURN:g}" if abs(found.turn) > MOST_TURN else ""
        )

    def back(self, values: NDArray[Any], pose: Pose, box: tuple[float, float, float, float]) -> NDArray[Any]:
        """Return values [.., h, w] of an aligned picture where they lie in the picture as it was.

        `box` (left, top, right, bottom) is what they cover, in pixels of the picture. Where nothing was judged, they
        are those of the edge.
        """
        height, width = values.shape[-2:]
        left, top, right, bottom = box
        spread = moved_by(left, top) @ np.diag([(right - left) / width, (bottom - top) / height, 1])
        matrix = np.linalg.inv(spread) @ np.linalg.inv(pose.matrix) @ spread
        planes = values.astype(np.float32).reshape(-1, height, width)
        moved = np.stack([self._reference.warped(plane, matrix) for plane in planes]).reshape(values.shape)
        return moved > 0.5 if values.dtype == np.bool_ else moved


class Reference:
    """A reference view, and the search for how another lies beside it."""

    def __init__(self, pixels: Pixels) -> None:
        self._cv2 = opencv()
        self.pixels, self.size = pixels, _size(pixels)
        self._small = self._reduced(pixels)
        self._window = self._cv2.createHanningWindow(_size(self._small), self._cv2.CV_32F)

    def find(self, seen: Pixels) -> Pose | None:
        """Return the pose of a part seen at the reference's size; None where nothing is alike.

        It is no move where none makes the two more alike, and no turn where none clearly does.
        """
        if min(seen.std(), self.pixels.std()) < FLAT:
            return None
        small = self._reduced(seen)
        coarse = {turn: self._coarse(small, turn) for turn in TURNS}
        begun = min(coarse.values(), key=lambda matrix: self._residual(self._small, small, matrix))
        matrix: Matrix = np.eye(3)
        residual, converged = self._residual(self.pixels, seen, matrix), False
        steps = ((coarse[0], self._cv2.MOTION_TRANSLATION, SLIGHTLY), (begun, self._cv2.MOTION_EUCLIDEAN, CLEARLY))
        for start, motion, share in steps:
            fine = self._fine(seen, self._enlarged(start), motion)
            if fine is None:
                continue
            converged, left = True, self._residual(self.pixels, seen, fine)
            if left < share * residual:
                matrix, residual = fine, left
        return Pose.of(matrix, self.size, residual) if converged else None

    def warped(self, pixels: NDArray[Any], matrix: Matrix, ground: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the pixels with those at `matrix` @ (x, y, 1) at (x, y).

        Beyond the edge they are the ground's, or like it. ImageError for more of them a side than OpenCV takes.
        """
        border = self._cv2.BORDER_REPLICATE if ground is None else self._cv2.BORDER_TRANSPARENT
        try:
            return self._warped(pixels, matrix, border, ground)
        except self._cv2.error as error:
            size = " x ".join(map(str, _size(pixels)))
            raise ImageError(f"a picture of {size} pixels cannot be aligned, OpenCV refuses it: {error.err}") from None

    def blurred(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Return float pixels without what is small."""
        found: NDArray[Any] = self._cv2.GaussianBlur(pixels, (0, 0), BLUR)
        return found

    def _warped(
        self, pixels: NDArray[Any], matrix: Matrix, border: int, ground: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        flags = self._cv2.INTER_LINEAR | self._cv2.WARP_INVERSE_MAP
        moved: NDArray[Any] = self._cv2.warpAffine(
            pixels, _of_centres(matrix)[:2], _size(pixels), dst=ground, flags=flags, borderMode=border
        )
        return moved

    def _reduced(self, pixels: Pixels) -> Pixels:
        width, height = _size(pixels)
        reduced: Pixels = self._cv2.resize(
            pixels, (width // COARSE, height // COARSE), interpolation=self._cv2.INTER_AREA
        )
        return reduced

    def _enlarged(self, matrix: Matrix) -> Matrix:
        """Return a move of reduced views as one of whole ones."""
        scale = np.diag([one / other for one, other in zip(self.size, _size(self._small), strict=True)] + [1])
        return scale @ matrix @ np.linalg.inv(scale)

    def _coarse(self, small: Pixels, turn: float) -> Matrix:
        """Return the best move of a reduced view with this turn."""
        turned = Pose(_size(small), turn=turn).matrix
        one, other = (np.float32(pixels) for pixels in (self._small, self.warped(small, turned)))
        (x, y), _ = self._cv2.phaseCorrelate(one, other, self._window)
        return turned @ moved_by(x, y)

    def _fine(self, seen: Pixels, start: Matrix, motion: int) -> Matrix | None:
        """Return the best move near a start; None where the search does not converge."""
        cv2 = self._cv2
        until = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 50, 1e-4)
        begun = np.float32(_of_centres(start)[:2])
        try:
            _, found = cv2.findTransformECC(self.pixels, seen, begun, motion, until, None, 5)
        except cv2.error:
            return None
        return _of_centres(np.vstack([found, [0, 0, 1]]), -1) if np.isfinite(found).all() else None

    def _residual(self, view: Pixels, seen: Pixels, matrix: Matrix) -> float:
        """Return 1 - the correlation of the view and what was seen, moved, where both are there."""
        there = self._warped(np.full_like(seen, 2), matrix, self._cv2.BORDER_CONSTANT) > 1
        if there.mean() < LEAST:
            return 1.0
        one, other = (pixels[there] - pixels[there].mean() for pixels in (view, self.warped(seen, matrix)))
        norm = float(np.linalg.norm(one) * np.linalg.norm(other))
        return max(0.0, 1 - float(one @ other) / norm) if norm else 1.0


def reduced(picture: "Image.Image", size: Size) -> Pixels:
    """Return the RGB picture [h, w, 3] at this size (w, h)."""
    from PIL import Image

    return np.asarray(picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))


def grey(pixels: Pixels) -> Pixels:
    """Return RGB pixels [h, w, 3] as levels of grey [h, w]."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))


def reference_size(size: Size) -> Size:
    """Return the size of the reference view of pictures of this size; CalibrationError for a narrow strip."""
    width, height = (max(1, round(side * SIDE / max(size))) for side in size)
    if min(width, height) < NARROWEST:
        raise CalibrationError(
            f"pictures of {size[0]} x {size[1]} pixels are too narrow to be aligned: leave out --align"
        )
    return width, height


def align(pictures: Sequence[Picture]) -> Alignment:
    """Return the alignment of a product by images of its good parts: one of them is the reference view.

    Of a few it is one that the others fit well, and that lies in their midst. Warns where some cannot be aligned.
    Raises CalibrationError where most cannot, ImageError naming those that cannot be read, UsageError without OpenCV.
    """
    opencv()
    views = _views(_spread(pictures, MOST))
    view = _midmost(_spread(views, CANDIDATES))
    reference = Reference(grey(view))
    found = [reference.find(grey(one)) for one in views]
    residuals = sorted(2.0 if one is None or one.residual is None else one.residual for one in found)
    worst = float(np.quantile(residuals, WORST))
    if worst > CEILING:
        bad = sum(residual > CEILING for residual in residuals)
        raise CalibrationError(
            f"{bad} of {len(views)} good images cannot be aligned with the others, they show too little that all have: "
            "leave out --align, or the images of other parts"
        )
    limit = min(CEILING, max(FLOOR, MARGIN * worst))
    alignment = Alignment(_encoded(view), float(np.median(residuals)), limit, len(views))
    aligner = Aligner(alignment)
    if odd := sum(one is None or bool(aligner.fault(one)) for one in found):
        sentence = f"{odd} of {len(views)} good images cannot be aligned, and are judged as they lie"
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    return alignment


def _views(pictures: Sequence[Picture]) -> list[Pixels]:
    """Return the pictures, all of the size that suits the first; ImageError naming those that are not read."""
    views: list[Pixels] = []
    faults: list[str] = []
    size: Size | None = None
    for picture in pictures:
        try:
            image = read_image(picture)
        except ImageError as error:
            faults.append(str(error))
            continue
        size = size or reference_size(image.size)
        views.append(reduced(image, size))
    refuse_unreadable(faults, len(pictures), "an alignment")
    return views


def _midmost(views: Sequence[Pixels]) -> Pixels:
    """Return the one of the views in whose midst the others lie, of those that they fit nearly as well as the best."""
    greys, scores = [grey(view) for view in views], []
    for index, view in enumerate(greys):
        reference, others = Reference(view), greys[:index] + greys[index + 1 :]
        found = [one for other in others if (one := reference.find(other)) is not None]
        residuals = [one.residual or 0.0 for one in found] + [1.0] * (len(others) - len(found))
        far = [np.hypot(*one.shift) + np.radians(abs(one.turn)) * max(one.size) / 2 for one in found]
        scores.append((float(np.median(residuals or [0])), float(np.median(far or [0]))))
    fit = ALIKE * max(FLOOR, min(residual for residual, _ in scores))
    return views[min((far, index) for index, (residual, far) in enumerate(scores) if residual <= fit)[1]]


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many of them, from the first to the last."""
    return [items[index] for index in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)]


def _encoded(pixels: Pixels) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _failed(size: Size, reason: str, residual: float | None = None) -> Pose:
    return Pose(size, residual=residual, fault=f"it was not aligned but judged as it lies: {reason}")


def _size(pixels: NDArray[Any]) -> Size:
    return pixels.shape[1], pixels.shape[0]


def _of_centres(matrix: Matrix, sign: int = 1) -> Matrix:
    """Return a move of places for pixels that are numbered by their centres, as OpenCV's are; with -1 the other way."""
    return moved_by(-sign / 2, -sign / 2) @ matrix @ moved_by(sign / 2, sign / 2)
