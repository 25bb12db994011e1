"""The log: lines for people or for machines, on stderr and in a file that may be rotated.

Here: how a line is written, and where. A line about a stream begins with its label, `name/stream`, by which its run is known
too; numbers that a machine may want are `extra` of the call. Not here: what is logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pathlib import Path

#: What every record has; anything else came as `extra`.
_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
#: The words of `loglevel`.
_LEVELS: Final = {logging.WARNING: "warn", logging.CRITICAL: "error"}
_LABEL: Final = re.compile(r"(?P<site>[^/:\s]+)/[^/:\s]+(?=: )")
#: The run of each site that this process works on.
_runs: dict[str, str] = {}
_form: Literal["text", "json"] = "text"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what is known of stream, run and numbers."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        message = record.getMessage()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _LEVELS.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "message": message,
        }
        if labelled := _LABEL.match(message):
            line["stream"] = labelled[0]
            if run := _runs.get(labelled["site"]):
                line["run"] = run
        line |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_print_format(form: Literal["text", "json"]) -> None:
    """Let this process print its errors and warnings in a form from now on."""
    global _form  # noqa: PLW0603  stderr is the process's too
    _form = form


def print_problem(kind: Literal["error", "warning"], line: str) -> None:
    """Print an error or a warning of the command on stderr, as a line of the chosen form."""
    shown = f"{kind}: {line}"
    if _form == "json":
        level = kind.upper()
        record = {"name": "sr_assets", "levelno": getattr(logging, level), "levelname": level, "msg": line}
        shown = JsonLines().format(logging.makeLogRecord(record))
    print(shown, file=sys.stderr, flush=True)  # noqa: T201  what a command says is no logger's, which may be silent


def open_log(level: str, form: Literal["text", "json"], file: Path | None) -> None:
    """Send our log to stderr, which Dagster captures with a run, and to a file; once per process.

    A file that was moved away is opened anew with the next line, so that it can be rotated.
    """
    ours = logging.getLogger("sr_assets")
    if ours.handlers:
        return
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(WatchedFileHandler(file, encoding="utf-8"))
    formatter = JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for handler in handlers:
        handler.setFormatter(formatter)
        ours.addHandler(handler)
    ours.setLevel(level.upper())


def note_run(site: str, run_id: str) -> None:
    """Let the lines about a site's streams name the run."""
    _runs[site] = run_id
