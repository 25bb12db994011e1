"""Acknowledgements of published messages, and whose they are."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from sr_assets.adapters.jetstream import NO_RESPONDERS, decode_response
from sr_assets.adapters.wire.connection import Connection
from sr_assets.adapters.wire.frames import FirstParser, Frame
from sr_assets.adapters.wire.link import WireError
from sr_assets.domain.foreign_text import visible

_LONGEST_ERROR: Final = 500
# A text in a server's JSON.
_TEXT: Final = rb'[^"\r\n]*'
# A stream's acknowledgement of a stored message, with placeholders for the names of stream and domain.
_STORED: Final = rb'\{"stream":"%b",(?:"domain":"%b",)?"seq":(\d{1,18})\}'
_STORED_BY_ANY: Final = re.compile(_STORED % (_TEXT, _TEXT))


class Ack(NamedTuple):
    """The outcome of a publish: stored at `target_sequence` (earlier if `duplicate`), or not stored with an error."""

    sequence: int
    target_sequence: int | None = None
    duplicate: bool = False
    error_code: int | None = None
    error: str | None = None


class StoredParser(FirstParser[tuple[bytes, int]]):
    """Takes acknowledgements of stored messages: their subject and the sequence; of one stream and one domain, if given."""

    def __init__(self, stream: str = "", domain: str = "") -> None:
        super().__init__()
        stored = _STORED % (_literal(stream), _literal(domain))
        # The subject, the size, the payload and its sequence.
        self._frame = re.compile(rb"MSG ([^ \r\n]+) [^ \r\n]+ (\d+)\r\n(%b)\r\n" % stored)
        # Not possessive, although backtracking is unnecessary: before Python 3.11.5 such a repetition ends in the wrong
        # position.
        self._frames = re.compile(rb"(?:MSG [^ \r\n]+ [^ \r\n]+ \d+\r\n%b\r\n)*" % stored)

    def parse(self, buffer: bytes) -> int:
        """Take the acknowledgements and return their end."""
        run = self._frames.match(buffer)
        if not run or not run.end():
            return 0
        subjects, sizes, payloads, sequences = zip(*self._frame.findall(buffer, 0, run.end()), strict=True)
        if list(map(int, sizes)) != list(map(len, payloads)):
            return 0
        self.taken += zip(subjects, map(int, sequences), strict=True)
        return run.end()


def _literal(name: str) -> bytes:
    """Return the pattern of a name as the server writes it into JSON; without a name, of any."""
    text = json.dumps(name, ensure_ascii=False)[1:-1]
    for special in "&<>":
        text = text.replace(special, f"\\u{ord(special):04x}")
    return re.escape(text.encode()) or _TEXT


class Answers:
    """Tells the responses of a stream, in the connection's configured domain, from those of others; all count without a name."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection, self._stream = connection, stream
        self._domain = connection.cluster.domain or "" if stream else ""
        self._other = ""

    def parser(self) -> StoredParser:
        """Return a parser of the stream's acknowledgements."""
        return StoredParser(self._stream, self._domain)

    def of_stream(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Yield the frames that are no response of another stream."""
        for frame in frames:
            if not self._stream or not self._is_other(frame.payload):
                yield frame

    def silence(self, seconds: float) -> WireError:
        """Return the error of missing acknowledgements."""
        other = f", only of {self._other}, which also accepts the subject" if self._other else ""
        return WireError(f"{self._connection.address}: no acknowledgement within {seconds:g} s{other}")

    def _is_other(self, payload: bytes) -> bool:
        try:
            answer = decode_response(payload)
        except ValueError:
            return False
        stream, domain = answer.get("stream") or self._stream, answer.get("domain") or self._domain
        if stream == self._stream and (not self._domain or domain == self._domain):
            return False
        self._other = f"stream {stream}" + (f" of domain {domain}" if domain else "")
        return True


def parse_ack(sequence: int, frame: Frame) -> Ack:
    """Parse the response to a publish; a response that is not from a stream counts as an error."""
    stored = _STORED_BY_ANY.fullmatch(frame.payload)
    if stored:
        return Ack(sequence, int(stored[1]))
    if frame.status == NO_RESPONDERS:
        return Ack(sequence, error_code=NO_RESPONDERS, error="no stream takes this subject")
    try:
        answer = json.loads(frame.payload)
        error = answer.get("error")
        if error:
            code = error.get("err_code") or error.get("code")
            # A core subscriber may answer, too: without a text it would count as stored.
            text = visible(str(error.get("description") or "an error without a description")[:_LONGEST_ERROR])
            return Ack(sequence, error_code=code if type(code) is int else None, error=text)
        stored_at = answer["seq"]
        if type(stored_at) is int and 0 <= stored_at < 1 << 63:
            return Ack(sequence, stored_at, duplicate=answer.get("duplicate") is True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return Ack(sequence, error=f"not the answer of a stream: {frame.payload[:80]!r}")
