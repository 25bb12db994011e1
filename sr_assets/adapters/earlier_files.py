"""The files in which earlier versions kept what `control.db` has: read when it is created, removed by the next run."""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.private import remove_files
from sr_assets.domain.errors import RunError

#: A damaged one is an error, which is better than copying a paused stream.
_OF_OPERATORS: Final = {"paused.json", "maintenance.json"}
_SITE_FILES: Final = (
    "status.json",
    "checkpoint.json",
    "checkpoint.seen",
    "checkpoint-now",
    "checkpoint-taken",
    "heartbeats.json",
    *_OF_OPERATORS,
)
#: Not imported: requests of commands, and waiting sites, have ended with their processes.
_ENDED: Final = ("closed", "step-down")
_HOME_FILES: Final = ("due_work.json", "run_failures.json", ".run_failures.json.lock")

Row = tuple[str, dict[str, Any]]


def import_earlier_files(connection: sqlite3.Connection, home: Path) -> None:
    """Store the content of the files. Raises RunError for a damaged one that a command wrote for an operator."""
    for file in _files(home):
        with _damage_refused(file):
            for table, row in list(_rows(file, _content(file))):
                changes = ", ".join(f"{name} = excluded.{name}" for name in row)
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
                    f" ON CONFLICT DO UPDATE SET {changes}",
                    list(row.values()),
                )


def remove_earlier_files(home: Path, site: str) -> None:
    """Remove the files of a site and those of the home."""
    folder = home / "sites" / site
    for name in (*_SITE_FILES, *_ENDED):
        (folder / name).unlink(missing_ok=True)
    for name in ("refill", "requests"):
        remove_files(folder / name, "*")
    for file in (*(home / name for name in _HOME_FILES), *(home / "notify").glob("*.json")):
        file.unlink(missing_ok=True)
    remove_files(home / "waiting", "*")


def _files(home: Path) -> Iterator[Path]:
    for folder in _site_folders(home):
        yield from (folder / name for name in _SITE_FILES if (folder / name).exists())
        yield from (folder / "refill").glob("*.json")
    yield from (home / name for name in _HOME_FILES[:2] if (home / name).exists())
    yield from (home / "notify").glob("*.json")


def _site_folders(home: Path) -> list[Path]:
    return [folder for folder in (home / "sites").glob("*") if folder.is_dir()]


def _content(file: Path) -> Any:  # noqa: ANN401  JSON
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if text else None


def _rows(file: Path, content: Any) -> Iterable[Row]:  # noqa: ANN401  JSON
    """Yield the rows of a file, each with its table."""
    site, whole = file.parent.name, json.dumps(content)
    match file.name:
        case "status.json":
            yield "site_status", {"site": site, "status": whole}
        case "checkpoint.json":
            yield "checkpoints", {"site": site, "stored": whole}
        case "checkpoint.seen":
            yield "checkpoints", {"site": site, "seen": int(content)}
        case "checkpoint-now" | "checkpoint-taken":
            yield "orders", {"site": site, "name": "checkpoint", "taken": 0}
        case "heartbeats.json":
            yield from (("heartbeats", {"site": site, "subject": subject, **row}) for subject, row in content.items())
        case "paused.json":
            yield from (("paused", {"site": site, "stream": str(stream)}) for stream in content["streams"])
        case "maintenance.json":
            yield from (
                ("windows", {"site": site, "id": row["id"], "rule": json.dumps(row)}) for row in content["windows"]
            )
        case "due_work.json":
            yield from (("due_work", {"name": name, "value": json.dumps(value)}) for name, value in content.items())
        case "run_failures.json":
            yield from (("run_failures", {**row, "streams": json.dumps(row["streams"])}) for row in content)
        case _ if file.parent.name == "notify":
            yield "notified", {"target": file.stem, "progress": whole}
        case _:
            again = int(content.pop("again", False))
            row = {"site": file.parents[1].name, "stream": file.stem, "progress": json.dumps(content), "again": again}
            yield "refills", row


@contextlib.contextmanager
def _damage_refused(file: Path) -> Iterator[None]:
    """Raise RunError for a damaged file of an operator; leave out another one."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, sqlite3.ProgrammingError) as error:
        if file.name in _OF_OPERATORS:
            raise RunError(
                f"{file} cannot be read ({error}); delete it, then pause streams or add windows again"
            ) from None
