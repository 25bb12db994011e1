"""The files in which earlier versions kept what `control.db` has: read when it is created, removed by the next run."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.private import remove_files
from sr_assets.domain.errors import RunError
from sr_assets.settings import asset_name

Row = tuple[str, dict[str, Any]]
#: Returns the rows of a file with their tables, from the name of its folder and its content.
_Read = Callable[[str, Any], Iterable[Row]]
#: A damaged one is an error, which is better than copying a paused stream.
_OF_OPERATORS: Final[dict[str, _Read]] = {
    "paused.json": lambda site, content: [
        ("paused", {"site": site, "stream": str(stream)}) for stream in content["streams"]
    ],
    "maintenance.json": lambda site, content: [
        ("windows", {"site": site, "id": row["id"], "rule": json.dumps(row)}) for row in content["windows"]
    ],
}
_OF_SITES: Final[dict[str, _Read]] = {
    "status.json": lambda site, content: [("site_status", {"site": site, "status": json.dumps(content)})],
    "checkpoint.json": lambda site, content: [("checkpoints", {"site": site, "stored": json.dumps(content)})],
    "checkpoint.seen": lambda site, content: [("checkpoints", {"site": site, "seen": int(content)})],
    "checkpoint-now": lambda site, _: [("orders", {"site": site, "name": "checkpoint", "taken": 0})],
    "checkpoint-taken": lambda site, _: [("orders", {"site": site, "name": "checkpoint", "taken": 0})],
    "heartbeats.json": lambda site, content: [
        ("heartbeats", {"site": site, "subject": subject, **_part(row, "published", "errors", "seconds")})
        for subject, row in content.items()
    ],
    **_OF_OPERATORS,
}
_OF_HOMES: Final[dict[str, _Read]] = {
    "due_work.json": lambda _, content: [
        ("due_work", {"name": name, "value": json.dumps(value)}) for name, value in content.items()
    ],
    "run_failures.json": lambda _, content: [
        (
            "run_failures",
            {**_part(row, "job", "run_id", "name", "reason", "since_ns"), "streams": json.dumps(row["streams"])},
        )
        for row in content
    ],
}
#: Not read: requests of commands, and waiting sites, have ended with their processes.
_ENDED: Final = ("closed", "step-down")
#: SQLite's errors about a value that is of another type than its column.
_MISFITS: Final = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.InterfaceError)


def import_earlier_files(connection: sqlite3.Connection, home: Path) -> None:
    """Store the content of the files. Raises RunError for a damaged one that a command wrote for an operator."""
    for file, read in _files(home):
        with _damage_refused(file):
            for table, row in read(file.parent.name, _content(file)):
                changes = ", ".join(f"{name} = excluded.{name}" for name in row)
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
                    f" ON CONFLICT DO UPDATE SET {changes}",
                    list(row.values()),
                )


def remove_earlier_files(home: Path, site: str) -> None:
    """Remove the files of a site and those of the home."""
    folder = home / "sites" / site
    for name in (*_OF_SITES, *_ENDED):
        (folder / name).unlink(missing_ok=True)
    for name in ("refill", "requests"):
        remove_files(folder / name, "*")
    for name in (*_OF_HOMES, ".run_failures.json.lock"):
        (home / name).unlink(missing_ok=True)
    remove_files(home / "waiting", "*")
    for file in (home / "notify").glob("*.json"):
        file.unlink(missing_ok=True)


def _files(home: Path) -> Iterator[tuple[Path, _Read]]:
    for folder in (home / "sites").glob("*"):
        yield from ((folder / name, read) for name, read in _OF_SITES.items() if (folder / name).exists())
        for file in (folder / "refill").glob("*.json"):
            yield file, partial(_refill, file)
    yield from ((home / name, read) for name, read in _OF_HOMES.items() if (home / name).exists())
    for file in (home / "notify").glob("*.json"):
        yield file, partial(_sent, file)


def _content(file: Path) -> Any:  # noqa: ANN401  JSON
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if text else None


def _refill(file: Path, _: str, content: dict[str, Any]) -> list[Row]:
    again, folder = int(content.pop("again", False)), file.parents[1]
    streams = _content(folder / "status.json")["streams"]
    stream = next((name for name in streams if asset_name(name) == file.stem), file.stem)
    row = {"site": folder.name, "stream": stream, "progress": json.dumps(content), "again": again}
    return [("refills", row)]


def _sent(file: Path, _: str, content: object) -> list[Row]:
    return [("notified", {"target": file.stem, "progress": json.dumps(content)})]


def _part(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


@contextlib.contextmanager
def _damage_refused(file: Path) -> Iterator[None]:
    """Raise RunError for a damaged file of an operator; leave out another one."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, *_MISFITS, OSError) as error:
        if file.name in _OF_OPERATORS:
            raise RunError(f"{file} cannot be read ({error}); delete it, then pause or add windows again") from None
