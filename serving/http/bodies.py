"""Reads what a request brings within its bounds: bytes as sent, bytes after decompression, the pixels of an image."""

import asyncio
import io
import warnings
import zlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from mdps.runtime.detector import Detector
from mdps.runtime.errors import ImageError
from mdps.runtime.image_files import odd_picture
from mdps.runtime.pictures import check_single
from mdps.runtime.preprocessing import Observations
from mdps.serving.http.refusals import Refusal, bad_request, too_large

_WBITS = {"gzip": 31, "deflate": 15}
_DISCARDED = 64 * 2**20  # bytes that a client may go on sending after it was refused
_PATIENCE = 2.0  # and seconds
# These come from cameras and browsers. Pillow knows many more, some of which start other programs.
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM")
# Each scan goes over all pixels again, and takes a few bytes where it says that there is nothing new in them.
_SCAN, _MOST_SCANS = b"\xff\xda", 64
# Pillow reads these number by number.
_WRITTEN_OUT, _MOST_DIGITS = (b"P1", b"P2", b"P3"), 2**20


class Incoming:
    """An ASGI `receive` that remembers how far a request's body was read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._asks_first = any(name == b"expect" for name, _ in scope["headers"])
        self._receive = receive
        self._begun = self._finished = False

    async def __call__(self) -> Message:
        """The next message."""
        message = await self._receive()
        self._begun = True
        self._finished = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Let a refused client finish sending, or it would see its connection reset and never read the answer.

        It has a moment for that. One that asks first (`Expect: 100-continue`) and was not told to go on sends nothing.
        """
        if self._asks_first and not self._begun:
            return
        left = _DISCARDED
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while not self._finished and left > 0:
                    left -= len((await self()).get("body", b""))


class Share:
    """One request's share of the memory for all bodies."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.held = 0

    def take(self, count: int) -> None:
        """So many bytes more. Refusal 503 where all requests together would hold too many."""
        if self._bodies.held + count > self._bodies.limit:
            raise Refusal(503, "bodies", "too many bodies at once: try again", retry_after=1, close=True)
        self._bodies.held += count
        self.held += count


class Bodies:
    """Counts the bytes of all bodies that are being read or worked on, so that many clients cannot fill the memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """A request's part, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.held -= share.held


async def read_body(request: Request, limit: int, share: Share) -> bytes:
    """The whole body, decompressed; `share` takes it into account.

    Refusal 413 beyond `limit` bytes, 415 for an unknown encoding, 400 for a broken one.
    """
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or int(declared) > limit:  # the HTTP parser has checked that it is digits
        raise _beyond(limit)
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > limit:
            raise _beyond(limit)
        share.take(len(chunk))
    body = bytes(chunks)
    del chunks
    plain = _decompressed(body, request.headers.get("content-encoding", "identity").strip().lower(), limit)
    share.take(len(plain) - len(body))
    return plain


def _beyond(limit: int) -> Refusal:
    return Refusal(413, "too_large", f"the body has more than {limit} bytes", close=True)


def _decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding == "identity":
        return body
    if encoding not in _WBITS:
        raise Refusal(415, "bad_request", "the content encoding should be gzip, deflate or identity")
    decoder = zlib.decompressobj(_WBITS[encoding])
    try:
        plain = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise bad_request(f"the body is no {encoding} data: {error}") from error
    if len(plain) > limit:
        raise too_large(f"the body has more than {limit} bytes when decompressed")
    if not decoder.eof or decoder.unused_data:
        raise bad_request(f"the {encoding} body is incomplete or goes on after its end")
    return plain


class _InMemory(MultiPartParser):
    spool_max_size = 2**62  # the body is in memory already: a file on the disk would be a second copy of it


def file_of_form(headers: Headers, body: bytes) -> bytes:
    """The one file of a multipart form; Refusal 400 where there is none, or more than one. Not for the event loop."""
    return asyncio.run(_file_of_form(headers, body))  # the parser is a coroutine that never waits


async def _file_of_form(headers: Headers, body: bytes) -> bytes:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _InMemory(headers, stream(), max_files=1, max_fields=16)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise bad_request(f"the form cannot be read: {error.message}") from error
    except (KeyError, ValueError) as error:
        raise bad_request(f"the form cannot be read: {error}") from error
    files = [value for _, value in form.multi_items() if not isinstance(value, str)]
    if len(files) != 1:
        raise bad_request("the form should hold the image as its one file")
    return await files[0].read()


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """An image that is not decoded yet. Refusal 413 for more than `max_pixels`, 400 for what is no one image."""
    if not data:
        raise _bad("the image is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError:
        raise _too_many(max_pixels) from None
    except Exception as error:  # decoders raise nearly every type on a damaged file
        raise _bad(f"this is no {', '.join(_FORMATS)} image, or a damaged one") from error
    check_pixels(image.size, max_pixels)
    if image.format in ("JPEG", "MPO") and data.count(_SCAN) > _MOST_SCANS:
        raise _bad(f"the JPEG has more than {_MOST_SCANS} scans")
    if image.format == "PPM" and data[:2] in _WRITTEN_OUT and len(data) > _MOST_DIGITS:
        raise _bad(f"a PPM written out in digits should have at most {_MOST_DIGITS} bytes: save it as a binary one")
    try:
        check_single(image, "the image")
    except ImageError as error:
        raise _bad(str(error)) from error
    return image


def check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Refusal 413 for a (width, height) of more than `max_pixels`."""
    if size[0] * size[1] > max_pixels:
        raise _too_many(max_pixels)


def observe(picture: Image.Image | NDArray[np.uint8], detector: Detector, notes: list[str]) -> Observations:
    """The views of one picture; ImageError with a sentence that names no Python type.

    `notes` gets a sentence for whatever is odd about an image file: more than 8 bits, much smaller than the network's;
    and for a part that was not aligned.
    """
    if isinstance(picture, Image.Image):
        notes += odd_picture(picture, None if detector.tiles else detector.preprocessing)
    try:
        seen = detector.observe([picture])
    except ImageError as error:
        raise ImageError(str(error).replace(f"the given {type(picture).__name__}", "the image")) from error
    notes += [pose.fault for pose in seen.poses if pose.fault]
    return seen


def _too_many(max_pixels: int) -> Refusal:
    return too_large(f"the image has more than {max_pixels} pixels")


def _bad(sentence: str) -> Refusal:
    return Refusal(400, "bad_image", sentence)
