"""Responses of JetStream's JSON API: parsing, error codes and the error class."""

import json
from typing import Any, Final

from nats.aio.msg import Msg

from sr_assets.adapters.wire import NO_STREAM, Ack, parse_ack
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.errors import RunError, TransientError

#: The code of a server that has no leader or is just starting.
UNAVAILABLE: Final = 503
SUBJECTS_TAKEN: Final = 10065
STREAM_NOT_FOUND: Final = 10059
MESSAGE_NOT_FOUND: Final = 10037
#: The name in a `STREAM.CREATE` contradicts its subject.
NAME_MISMATCH: Final = 10056
#: A `STREAM.CREATE` of a stream that exists with another configuration.
NAME_TAKEN: Final = 10058
#: A request with a body where the API expects none, such as `STREAM.DELETE`.
NOT_EMPTY: Final = 10038
#: A cluster too small for the replicas, or a server without a cluster.
TOO_FEW_SERVERS: Final = frozenset({10005, 10074})


class ApiError(RunError):
    """JetStream answered with an error; `code` is its `err_code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def read_answer(label: str, subject: str, data: bytes) -> dict[str, Any]:
    """Return the JSON of a response from an API subject.

    Raises TransientError if the API is unavailable, ApiError on any other error, RunError if the response is not JSON.
    """
    try:
        answer: dict[str, Any] = json.loads(data)
    except ValueError:
        raise RunError(f"{label}: {subject}: the response is not JSON: {data[:80]!r}") from None
    error = answer.get("error")
    if error:
        text = f"{label}: {subject}: {error.get('description')} ({error.get('err_code')})"
        if error.get("code") == UNAVAILABLE:
            raise TransientError(text)
        raise ApiError(text, int(error.get("err_code") or error.get("code") or 0))
    return answer


def read_ack(message: Msg) -> Ack:
    """Parse an acknowledgement that nats-py received, with the parser of `wire`."""
    status = (message.headers or {}).get("Status")
    headers = f"NATS/1.0 {status}\r\n\r\n".encode() if status else b""
    return parse_ack(0, Frame(b"HMSG", headers=headers, payload=message.data))


def refusal_text(ack: Ack) -> str | None:
    """Return why the server did not store a message, with its error code, or None if it did."""
    if ack.error is None or ack.error_code in (None, NO_STREAM):
        return ack.error
    return f"{ack.error} ({ack.error_code})"
