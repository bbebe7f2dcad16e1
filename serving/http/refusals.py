"""Why a request gets no result: a status, a kind that is counted, and a sentence for whoever sent it."""

from http import HTTPStatus

from starlette.responses import JSONResponse


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """Ends a request. `kind` is one of a fixed few, because each is a series in the metrics.

    `retry_after` is in whole seconds; `close` ends the connection too, because what it still holds cannot be trusted.
    """

    def __init__(
        self, status: int, kind: str, sentence: str, *, retry_after: int | None = None, close: bool = False
    ) -> None:
        super().__init__(sentence)
        self.status, self.kind, self.sentence = status, kind, sentence
        self.retry_after, self.close = retry_after, close

    def response(self) -> JSONResponse:
        """The protocol's form of an error: a JSON object with the key `error`."""
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.close:
            headers["connection"] = "close"
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse({"error": self.sentence}, self.status, headers)


def bad_request(sentence: str) -> Refusal:
    """400 for what no correct client sends."""
    return Refusal(HTTPStatus.BAD_REQUEST, "bad_request", sentence)


def too_large(sentence: str) -> Refusal:
    """413 for a body, a picture or a tensor beyond the limits."""
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", sentence)


def too_late(sentence: str) -> Refusal:
    """504 for a deadline that passed."""
    return Refusal(HTTPStatus.GATEWAY_TIMEOUT, "deadline", sentence)
