"""Child processes' output as JSON lines for `log_format: json`, including lines of Dagster, Spark and Java.

Children write into a pipe. JSON lines pass unchanged, as lines of this package only with the tag that its children know;
other text becomes an event with time, level, logger and message.
Immediately following lines, such as a traceback, are appended to the event.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import select
import sys
from collections.abc import Generator, Iterator
from datetime import datetime
from typing import Any, Final

from sr_assets.adapters.logs import TAG_VARIABLE, JsonLines, LogFile
from sr_assets.adapters.private import open_to_append
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.settings import Settings

#: An event ends after this pause, or after this number of lines.
_FOLLOWS_SECONDS: Final = 0.2
_LONGEST_EVENT: Final = 1_000
_JOIN_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.1
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
#: Formats of first lines: Dagster, Spark, Python's default logging, the command line of this package.
_LEVEL: Final = "(?P<level>DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)"
_FIRST_LINES: Final = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        rf"(?P<time>\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{{4}}) - (?P<logger>\S+) - {_LEVEL} - (?P<message>.*)",
        rf"\d\d/\d\d/\d\d \d\d:\d\d:\d\d {_LEVEL} (?P<logger>\S+): (?P<message>.*)",
        rf"{_LEVEL}:(?P<logger>[^:\s]+):(?P<message>.*)",
        r"(?P<level>error|warning): (?P<message>.*)",
    )
)
_LEVELS: Final = {"WARN": logging.WARNING, "FATAL": logging.CRITICAL} | logging.getLevelNamesMapping()
_RUN: Final = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\b")
#: This package's loggers, which write into the file directly.
_OWN_LOGGERS: Final = "sr_assets"


class ChildLogs:
    """The output of child processes: JSON lines, or unchanged text; `to_file` sends it to a configured `logfile`."""

    def __init__(self, settings: Settings, *, to_file: bool) -> None:
        self._json = settings.log_format == "json"
        self._file = settings.logfile if to_file else None
        self._handler = (
            LogFile(self._file, delay=True) if self._file and self._json else logging.StreamHandler(sys.stderr)
        )
        self._pipes: list[_Pipe] = []
        # The tag of this process's own parent, if it has one, is for its own lines.
        self._tag = f"{secrets.token_hex(8)} " if self._json else ""
        if self._json:
            os.environ[TAG_VARIABLE] = self._tag

    @contextlib.contextmanager
    def output(self, source: str) -> Iterator[int | None]:
        """Yield a descriptor to start the child with inside the block, or None if it inherits stderr."""
        if not self._json:
            with os.fdopen(open_to_append(self._file), "ab") if self._file else contextlib.nullcontext() as file:
                yield None if file is None else file.fileno()
            return
        reader, writer = os.pipe()
        pipe = _Pipe(reader, source, self._handler, self._tag, drop_own=self._file is not None)
        pipe.thread.start()
        self._pipes.append(pipe)
        try:
            yield writer
        finally:
            os.close(writer)

    def close(self) -> None:
        """Wait until the output of the ended children is written."""
        for pipe in self._pipes:
            pipe.thread.join(_JOIN_SECONDS)
        if self._json:
            os.environ.pop(TAG_VARIABLE, None)
        self._handler.close()


class _Pipe:
    """One child's output, line by line, until its last writer closes the pipe: a lost reader would end the child."""

    def __init__(self, reader: int, source: str, handler: logging.Handler, tag: str, *, drop_own: bool) -> None:
        # Its child waits meanwhile.
        self.thread = BackgroundThread(f"log of {source}", self._read, longest_pause_seconds=_PAUSE_SECONDS)
        self._reader, self._source, self._handler, self._drop_own = reader, source, handler, drop_own
        self._tag = tag
        self._event: list[str] = []
        self._rest = b""

    def _read(self) -> Generator[float]:
        while True:
            yield 0.0
            if self._event and not select.select([self._reader], [], [], _FOLLOWS_SECONDS)[0]:
                self._end_event()
                continue
            if not (some := os.read(self._reader, 1 << 16)):
                break
            *lines, self._rest = (self._rest + some).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))
        self._take(self._rest.decode(errors="replace"))
        self._end_event()
        os.close(self._reader)

    def _take(self, raw: str) -> None:
        line = _COLOURS.sub("", raw).rstrip()
        if not line:
            return
        tagged, line = line.startswith(self._tag), line.removeprefix(self._tag)
        record = _as_json(line)
        ours = record is not None and str(record.get("logger", "")).partition(".")[0] == _OWN_LOGGERS
        if record is not None and ours <= tagged:
            self._end_event()
            if not (self._drop_own and ours):
                self._write(line)
            return
        if len(self._event) >= _LONGEST_EVENT or any(pattern.match(line) for pattern in _FIRST_LINES):
            self._end_event()
        self._event.append(line)

    def _end_event(self) -> None:
        if self._event:
            text, self._event = "\n".join(self._event), []
            self._write(as_event(text, self._source))

    def _write(self, line: str) -> None:
        self._handler.handle(logging.makeLogRecord({"msg": line}))


def _as_json(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def as_event(text: str, source: str) -> str:
    """Return a text as one JSON line with the time, level and logger of its first line; the default logger is `source`."""
    match = next(filter(None, (pattern.match(text) for pattern in _FIRST_LINES)), None)
    fields = match.groupdict() if match else {}
    level = _LEVELS.get((fields.get("level") or "INFO").upper(), logging.INFO)
    record = {
        "name": fields.get("logger") or source,
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": fields.get("message", text),
    }
    if time := fields.get("time"):
        with contextlib.suppress(ValueError):  # digits that are not a time
            record["created"] = datetime.strptime(time, "%Y-%m-%d %H:%M:%S %z").timestamp()
    if run := _RUN.search(text):
        record["run"] = run[0]
    return JsonLines().format(logging.makeLogRecord(record))
