"""When the JetStream API, or a direct get, does not answer with what was asked for: one clear line."""

from typing import Any

from sr_assets.adapters.wire.connection import Connection
from sr_assets.adapters.wire.frames import NO_RESPONDERS, Frame
from sr_assets.adapters.wire.link import WireError


def succeeded(connection: Connection, stream: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the API's answer when it is no error; raises WireError with the server's description."""
    error = answer.get("error")
    if error:
        reason = f"{error.get('description')} ({error.get('err_code', error.get('code'))})"
        raise WireError(f"{connection.address}: stream {stream}: {reason}")
    return answer


def refused(connection: Connection, stream: str, frame: Frame) -> WireError:
    """The error for a frame that came where a message was expected."""
    if frame.status == NO_RESPONDERS:
        return WireError(f"{connection.address}: no stream {stream} with direct get (allow_direct) answers")
    answer = frame.status_text if frame.status is not None else repr(frame.payload[:80])
    return WireError(f"{connection.address}: stream {stream} answered {answer}")
