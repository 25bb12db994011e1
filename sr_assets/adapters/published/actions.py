"""The table `operator_actions`: who did what by command, one JSON line per action in `actions/actions.jsonl`."""

import contextlib
import getpass
import json
import logging
import os
import socket
from pathlib import Path
from typing import Final, NamedTuple

from sr_assets.adapters import times
from sr_assets.adapters.private import make_shared_folder, share_as_folder
from sr_assets.adapters.published.tables import in_home
from sr_assets.domain.errors import cannot_write

logger = logging.getLogger(__name__)

NAME: Final = "operator_actions"
FOLDER: Final = "actions"
_WRITTEN: Final = {
    "at": "TIMESTAMPTZ",
    "user": "VARCHAR",
    "host": "VARCHAR",
    "action": "VARCHAR",
    "subject": "VARCHAR",
    "detail": "VARCHAR",
}
#: Names that need no quotes in SQL → the written ones that do.
_ALIASES: Final = {"occurred_at": "at", "operator": "user"}
COLUMNS: Final = {**_WRITTEN, **{name: _WRITTEN[written] for name, written in _ALIASES.items()}}


class Origin(NamedTuple):
    """The time, the user and the host of a command."""

    at: str
    user: str
    host: str


def origin() -> Origin:
    """Return the origin of a command of this process, now."""
    return Origin(times.utc_now().isoformat(timespec="microseconds"), _user(), socket.gethostname())


def record_action(
    home: Path, action: str, subject: str, detail: str = "", *, by: Origin | None = None, again: bool = False
) -> dict[str, str]:
    """Append a row about a completed action, and return it.

    `action` is the command's words, `subject` its stream, site or cluster, `by` its origin if another process completes it.
    `again`: the row may exist already, and is not repeated. The action is done, so a failure is only logged.
    """
    row = {**(by or origin())._asdict(), "action": action, "subject": subject, "detail": detail}
    line = json.dumps(row).encode() + b"\n"
    try:
        if again and line in _file(home).read_bytes():
            return row
        with os.fdopen(os.open(_file(home), os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
            # One write appends the whole line, whatever other commands append.
            file.write(line)
    except OSError as error:
        logger.warning("%s: %s is not recorded: %s", subject, action, cannot_write(home / FOLDER, error))
    return row


def actions_query(home: Path) -> str:
    """Return the query of the table's view, which shows an action as soon as its line is written."""
    columns = ", ".join(f"'{name}': '{kind}'" for name, kind in _WRITTEN.items())
    aliases = ", ".join(f'"{written}" AS {name}' for name, written in _ALIASES.items())
    file = f"{in_home(str(home))} || '/{_file(home).relative_to(home)}'"
    # A copy, or a full disk, may end in half a line, which is NULL here.
    options = "format = 'newline_delimited', hive_partitioning = false, ignore_errors = true"
    return f'SELECT *, {aliases} FROM read_json({file}, {options}, columns = {{{columns}}}) WHERE "at" IS NOT NULL'


def version(home: Path) -> str:
    """Return the version of the table, which grows with each action."""
    with contextlib.suppress(FileNotFoundError):
        return str(_path(home).stat().st_size)
    return "0"


def _file(home: Path) -> Path:
    """Return the file, which exists then."""
    file = _path(home)
    if not file.exists():
        make_shared_folder(file.parent)
        file.touch(mode=0o600)
        share_as_folder(file)
    return file


def _path(home: Path) -> Path:
    return home / FOLDER / "actions.jsonl"


def _user() -> str:
    """Return the user's name, or its number if the system knows no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
