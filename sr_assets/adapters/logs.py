"""The log, as text or JSON lines, on stderr and in a file that may be rotated.

A line about a stream begins with its label, `name/stream`, which also identifies its run. Pass numbers as `extra`.
"""

import contextlib
import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sr_assets.adapters.private import open_to_append
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.foreign_text import visible

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: The attributes of every record; all others were passed as `extra`.
_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
#: The words of `loglevel`.
_LEVELS: Final = {logging.WARNING: "warn", logging.CRITICAL: "error"}
_LABEL: Final = re.compile(r"(?P<site>[^/:\s]+)/[^/:\s]+(?=: )")
#: The run of each site that this process works on.
_runs: dict[str, str] = {}
_form: Literal["text", "json"] = "text"
#: The variable with the tag that a parent expects in front of its children's JSON lines on stderr: text that begins like
#: such a line, for example in a traceback, must not pass as one.
TAG_VARIABLE: Final = "SR_ASSETS_LOG_TAG"
_tag = os.environ.get(TAG_VARIABLE, "")


def take_tag() -> None:
    """Use the tag of the parent of this process, which has imported this module before it had that parent."""
    global _tag  # noqa: PLW0603  as at the import
    _tag = os.environ.get(TAG_VARIABLE, "")


class JsonLines(logging.Formatter):
    """One JSON object per line, after a `tag`: time, level, logger, message, and stream, run and numbers if known."""

    def __init__(self, tag: str = "") -> None:
        super().__init__()
        self._tag = tag

    def format(self, record: logging.LogRecord) -> str:
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
        return self._tag + json.dumps(line, default=str, ensure_ascii=False)


class TextLines(logging.Formatter):
    """One line per record; those of a traceback are indented. Foreign text forges no line and controls no terminal.

    A `bare` line has no time and no level.
    """

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self._bare = bare

    def format(self, record: logging.LogRecord) -> str:
        begin = "" if self._bare else f"{self.formatTime(record)} {record.levelname} "
        line = f"{begin}{visible(record.getMessage())}"
        traceback = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join([line, *(f"  {visible(each)}" for each in traceback)])


def set_print_format(form: Literal["text", "json"]) -> None:
    """Set the form in which this process prints errors and warnings."""
    global _form  # noqa: PLW0603  stderr is the process's too
    _form = form


def print_error(text: str) -> None:
    """Print an error of the command as one line on stderr."""
    _print_problem("error", text)


def print_warning(text: str) -> None:
    """Print a warning of the command as one line on stderr."""
    _print_problem("warning", text)


def _print_problem(kind: Literal["error", "warning"], text: str) -> None:
    line = visible(" ".join(text.split()))
    shown = f"{kind}: {line}"
    if _form == "json":
        level = kind.upper()
        record = {"name": "sr_assets", "levelno": getattr(logging, level), "levelname": level, "msg": line}
        shown = JsonLines(_tag).format(logging.makeLogRecord(record))
    # A full disk or a closed pipe must not end the work that reports.
    with contextlib.suppress(OSError):
        print(f"{shown}\n", end="", file=sys.stderr, flush=True)  # noqa: T201  what a command says is no logger's, which may be silent


class LogFile(WatchedFileHandler):
    """A file that is reopened after it was moved. A failure, such as a full disk, is printed and not raised."""

    def __init__(self, file: Path, *, delay: bool = False) -> None:
        super().__init__(file, encoding="utf-8", delay=delay)

    def _open(self) -> TextIOWrapper:
        return os.fdopen(open_to_append(Path(self.baseFilename)), "a", encoding=self.encoding, errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            super().emit(record)
        except (OSError, ConfigurationError):
            self.handleError(record)


def escape_warnings() -> None:
    """Make foreign text harmless in the warnings of a process that opens no log, which Python prints as they are."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(TextLines(bare=True))


def configure_logging(settings: "Settings") -> None:
    """Open this process's log as the settings say; once per process."""
    open_log(settings.loglevel, settings.log_format, settings.logfile)


def open_log(level: str, form: Literal["text", "json"], file: Path | None) -> None:
    """Send the package's log to stderr, which Dagster captures for a run, and to a file; once per process.

    The next line reopens a file that was moved, so that it can be rotated.
    """
    ours = logging.getLogger("sr_assets")
    if ours.handlers:
        return
    handlers: list[tuple[logging.Handler, str]] = [(logging.StreamHandler(sys.stderr), _tag)]
    if file is not None:
        handlers.append((LogFile(file), ""))
    for handler, tag in handlers:
        handler.setFormatter(JsonLines(tag) if form == "json" else TextLines())
        ours.addHandler(handler)
    ours.setLevel(level.upper())


def note_run(site: str, run_id: str) -> None:
    """Add the run to later JSON lines about a site's streams."""
    _runs[site] = run_id
