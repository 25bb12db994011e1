"""Requests of operators to a site's run, and in `state.duckdb` the answered ones.

A command does not hold the site's lock during a run, so it leaves a request. The run that applies it takes it first; from then
on the command cannot withdraw it. The transaction that applies a request stores its answer, so that a killed run applies none
twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, Literal

from sr_assets.adapters import control, times
from sr_assets.adapters.state.stream_tables import StreamTable

#: Requests that no run completed, and answers that no command read, are deleted after this time.
_KEPT_SECONDS: Final = 3600.0
Action = Literal["retire", "unretire"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request about a node of one stream.

    `reason` and the origin (`at`, `user`, `host`) are those of the command, for the row in `operator_actions`.
    """

    id: str
    action: Action
    stream: str
    node: str
    reason: str = ""
    at: str = ""
    user: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a request was applied, and the result or the reason as a line."""

    done: bool
    line: str


class AnsweredRequests(StreamTable):
    """One stream's applied requests that may still be open. Call the method that changes them in a transaction."""

    def find(self, request_id: str) -> Answer | None:
        """Return the stored answer to a request, or None if it was not applied yet."""
        rows = self._connection.execute(
            "SELECT done, line FROM answered_requests WHERE stream = ? AND id = ?", [self._stream, request_id]
        ).fetchall()
        return Answer(*rows[0]) if rows else None

    def add(self, request_id: str, answer: Answer, *, open_ids: Iterable[str]) -> None:
        """Store an answer, and delete those of requests that are no longer open."""
        self._connection.execute(
            "DELETE FROM answered_requests WHERE stream = ? AND NOT list_contains(?::VARCHAR[], id)",
            [self._stream, list(open_ids)],
        )
        values = [self._stream, request_id, answer.done, answer.line]
        self._connection.execute("INSERT INTO answered_requests VALUES (?, ?, ?, ?)", values)


def leave_request(folder: Path, action: Action, stream: str, node: str, reason: str = "", **origin: str) -> Request:
    """Leave a request in a site's folder for its run."""
    request = Request(uuid.uuid4().hex, action, stream, node, reason, **origin)
    home, site = control.place_of(folder)
    row = {
        "site": site,
        **asdict(request),
        "boot": times.boot_id(),
        "boot_seconds": times.boot_seconds(),
        "created": times.time(),
    }
    statement = f"INSERT INTO requests ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
    control.change(home, statement, *row.values())
    return request


def take_requests(folder: Path, stream: str) -> list[Request]:
    """Take the open requests about a stream in order, including the requests that a killed run took."""
    home, site = control.place_of(folder)
    if not control.query(home, "SELECT 1 FROM requests WHERE site = ? LIMIT 1", site):
        return []
    columns = ", ".join(field.name for field in fields(Request))
    with control.transaction(home) as connection:
        # The age is by a clock that no one sets, unless the request is from before the machine's start.
        connection.execute(
            "DELETE FROM requests WHERE iif(boot = ?, ? - boot_seconds, ? - created) > ?",
            [times.boot_id(), times.boot_seconds(), times.time(), _KEPT_SECONDS],
        )
        rows = connection.execute(
            f"UPDATE requests SET taken = 1 WHERE site = ? AND stream = ? AND line IS NULL RETURNING number, {columns}",
            [site, stream],
        ).fetchall()
    return [Request(*row[1:]) for row in sorted(rows)]


def answer_request(folder: Path, request: Request, answer: Answer) -> None:
    """Return the answer to the command, and remove the request."""
    home, _ = control.place_of(folder)
    control.change(home, "UPDATE requests SET done = ?, line = ? WHERE id = ?", answer.done, answer.line, request.id)


def read_answer(folder: Path, request: Request) -> Answer | None:
    """Return the answer to a request once it exists, and remove it."""
    home, _ = control.place_of(folder)
    statement = "SELECT done, line FROM requests WHERE id = ? AND line IS NOT NULL"
    for done, line in control.query(home, statement, request.id):
        control.change(home, "DELETE FROM requests WHERE id = ?", request.id)
        return Answer(bool(done), line)
    return None


def withdraw_request(folder: Path, request: Request) -> bool:
    """Withdraw a request; return False if a run has taken it."""
    home, _ = control.place_of(folder)
    return bool(control.change(home, "DELETE FROM requests WHERE id = ? AND taken = 0", request.id))
