"""JetStream's JSON API for both transports: error codes, request bodies, and the parsing of responses and errors.

A run sends its requests through `nats.administration.Cluster`, a bulk task through `wire.Connection`.
"""

import base64
import json
from typing import Any, Final, Protocol

from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import parse_rfc3339_ns

#: The status of a subject without responders, and of a server that has no leader or is just starting.
NO_RESPONDERS: Final = 503

CONSUMER_NOT_FOUND: Final = 10014
CONSUMER_EXISTS: Final = 10148
#: Of a stream with work-queue retention.
CONSUMER_WITHOUT_ACKS: Final = 10084
#: A request with a body where the API expects none, such as `STREAM.DELETE`.
BODY_NOT_EMPTY: Final = 10038
INVALID_JSON: Final = 10025
MESSAGE_NOT_FOUND: Final = 10037
STREAM_NOT_FOUND: Final = 10059
#: The name in a `STREAM.CREATE` contradicts its subject.
NAME_MISMATCH: Final = 10056
#: A `STREAM.CREATE` of a stream that exists with another configuration.
NAME_TAKEN: Final = 10058
SUBJECTS_TAKEN: Final = 10065
WRONG_LAST_SEQUENCE: Final = 10071
_UNAVAILABLE: Final = 10008
#: A cluster too small for the replicas, or a server without a cluster.
TOO_FEW_SERVERS: Final = frozenset({10005, 10074})

EMPTY_HEADERS: Final = b"NATS/1.0\r\n\r\n"


class ApiError(RunError):
    """JetStream answered with an error; `code` is its `err_code`, `description` the server's text alone."""

    def __init__(self, message: str, code: int = 0, description: str = "") -> None:
        super().__init__(message)
        self.code, self.description = code, description


class PermissionDeniedError(RunError):
    """The user lacks a permission: a retry fails too."""


class JetStreamApi(Protocol):
    """A connection that sends requests to JetStream's API."""

    def request_api(self, operation: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response to an operation such as `STREAM.NAMES`; raises ApiError with the server's description."""
        ...


def encode_json(value: dict[str, Any]) -> bytes:
    """Return compact JSON, the body of a request."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode_response(payload: bytes) -> dict[str, Any]:
    """Return the JSON of a response, `error` included; raises ValueError if it is not a response of JetStream."""
    try:
        response = json.loads(payload)
        if isinstance(response, dict) and isinstance(response.get("error") or {}, dict):
            return response
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"not a response of JetStream: {payload[:80]!r}")


def is_leaderless(info: dict[str, Any]) -> bool:
    """Return whether a stream info comes from a follower that knows no leader: its state may be out of date."""
    cluster = info.get("cluster") or {}
    return bool(cluster.get("replicas")) and not cluster.get("leader")


def is_unavailable(response: dict[str, Any]) -> bool:
    """Return whether the server knows no leader of its cluster now: during an election, or after it was suspended."""
    error = response.get("error")
    return isinstance(error, dict) and error.get("err_code") == _UNAVAILABLE


def check_response(label: str, operation: str, response: dict[str, Any]) -> dict[str, Any]:
    """Return a response; raises ApiError if it is an error, TransientError if the API is unavailable, or a stream's leader."""
    error = response.get("error")
    if error:
        code = error.get("err_code") or error.get("code")
        text = f"{label}: {operation}: {error.get('description')} ({code})"
        if error.get("code") == NO_RESPONDERS:
            raise TransientError(text)
        raise ApiError(text, code if isinstance(code, int) else 0, str(error.get("description")))
    if operation.startswith("STREAM.INFO.") and is_leaderless(response):
        raise TransientError(f"{label}: {operation}: the stream has no leader")
    return response


def parse_message(response: dict[str, Any]) -> Message:
    """Return the message in the response of `STREAM.MSG.GET`, with headers byte for byte; raises RunError if it has none."""
    try:
        stored = response["message"]
        sequence, subject = stored["seq"], stored["subject"]
        stored_ns = parse_rfc3339_ns(stored["time"])
        headers = base64.b64decode(stored.get("hdrs") or "", validate=True)
        if type(sequence) is int and 0 < sequence < 1 << 63 and abs(stored_ns) < 1 << 63 and isinstance(subject, str):
            return Message(
                sequence=sequence,
                stored_ns=stored_ns,
                subject=subject,
                headers=b"" if headers == EMPTY_HEADERS else headers,
                payload=base64.b64decode(stored.get("data") or "", validate=True),
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise RunError(f"not a message of JetStream: {str(response)[:80]!r}")


def temporary_consumer(name: str, first: int, filter_subject: str | None, inactive_ns: int) -> dict[str, Any]:
    """Return the configuration of a pull consumer from a sequence on, which the server deletes after `inactive_ns`."""
    config: dict[str, Any] = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(1, first),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": inactive_ns,
    }
    return {**config, "filter_subject": filter_subject} if filter_subject else config


def consumer_creation(stream: str, config: dict[str, Any], **more: str) -> tuple[str, dict[str, Any]]:
    """Return the operation and the body that create a consumer; the operation names its filter, for permissions."""
    subject = config.get("filter_subject")
    operation = f"CONSUMER.CREATE.{stream}.{config['name']}" + (f".{subject}" if subject else "")
    return operation, {"stream_name": stream, "config": config, **more}
