"""The log of our processes with `log_format: json`: every line is one JSON object, also Dagster's, Spark's and Java's.

What a child writes goes through a pipe: JSON passes, anything else becomes an event with time, level, logger and message; lines
that follow at once, a trace say, are its end. Not here: our own lines (`adapters.logs`), which processes there are
(`services`, `runs`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import sys
import threading
from datetime import datetime
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.logs import JsonLines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.settings import Settings

#: An event ends when nothing follows for so long, or after so many lines.
_FOLLOWS_SECONDS: Final = 0.2
_LONGEST_EVENT: Final = 1_000
_JOIN_SECONDS: Final = 5.0
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
#: How lines begin: Dagster's, Spark's, those of Python's own logging, ours of the command line.
_LEVEL: Final = "(?P<level>DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)"
_BEGINNINGS: Final = tuple(
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
#: The loggers of this package, which write into the file themselves.
_OURS: Final = "sr_assets"


class ChildLogs:
    """Where children write, from `with` to its end; in text that is where it always was."""

    def __init__(self, settings: Settings, *, to_file: bool) -> None:
        """Take the configuration; `to_file`: everything goes to `logfile`, if there is one, else to stderr."""
        self._json = settings.log_format == "json"
        self._file = settings.logfile if to_file else None
        self._handler = (
            WatchedFileHandler(self._file, encoding="utf-8", delay=True)
            if self._file and self._json
            else logging.StreamHandler(sys.stderr)
        )
        self._pipes: list[_Pipe] = []

    @contextlib.contextmanager
    def output(self, source: str) -> Iterator[int | None]:
        """Yield a descriptor for what a child writes, to be given to it inside `with`; None: it has stderr as it is."""
        if not self._json:
            with self._file.open("ab") if self._file else contextlib.nullcontext() as file:
                yield None if file is None else file.fileno()
            return
        reader, writer = os.pipe()
        pipe = _Pipe(reader, source, self._handler, drop_ours=self._file is not None)
        pipe.start()
        self._pipes.append(pipe)
        try:
            yield writer
        finally:
            os.close(writer)

    def close(self) -> None:
        """Wait until what the children wrote is written, once they have ended."""
        for pipe in self._pipes:
            pipe.join(_JOIN_SECONDS)
        self._handler.close()


class _Pipe(threading.Thread):
    """One child's output, line by line, until its last writer has gone."""

    def __init__(self, reader: int, source: str, handler: logging.Handler, *, drop_ours: bool) -> None:
        super().__init__(name=f"log of {source}", daemon=True)
        self._reader, self._source, self._handler, self._drop_ours = reader, source, handler, drop_ours
        self._event: list[str] = []

    def run(self) -> None:
        """Read until the end."""
        rest = b""
        with contextlib.closing(os.fdopen(self._reader, "rb", buffering=0)):
            while True:
                if self._event and not select.select([self._reader], [], [], _FOLLOWS_SECONDS)[0]:
                    self._end_event()
                    continue
                if not (some := os.read(self._reader, 1 << 16)):
                    break
                *lines, rest = (rest + some).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"))
            self._take(rest.decode(errors="replace"))
            self._end_event()

    def _take(self, raw: str) -> None:
        line = _COLOURS.sub("", raw).rstrip()
        if not line:
            return
        if (known := _as_json(line)) is not None:
            self._end_event()
            if not (self._drop_ours and str(known.get("logger", "")).partition(".")[0] == _OURS):
                self._write(line)
            return
        if len(self._event) >= _LONGEST_EVENT or any(beginning.match(line) for beginning in _BEGINNINGS):
            self._end_event()
        self._event.append(line)

    def _end_event(self) -> None:
        if self._event:
            self._write(as_event("\n".join(self._event), self._source))
            self._event = []

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
    """Return a text as one line of JSON, with what its beginning says of time, level and logger; else it is `source`'s."""
    match = next(filter(None, (beginning.match(text) for beginning in _BEGINNINGS)), None)
    said = match.groupdict() if match else {}
    level = _LEVELS.get((said.get("level") or "INFO").upper(), logging.INFO)
    record = {
        "name": said.get("logger") or source,
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": said.get("message", text),
    }
    if time := said.get("time"):
        record["created"] = datetime.strptime(time, "%Y-%m-%d %H:%M:%S %z").timestamp()
    if run := _RUN.search(text):
        record["run"] = run[0]
    return JsonLines().format(logging.makeLogRecord(record))
