"""Requests of operators to a site's run: files in `sites/<name>/requests`, and the answered ones in `state.duckdb`.

A command does not hold the site's lock during a run, so it leaves a request: `<id>.json`. The run that applies it renames
the file to `<id>.taken` first; from then on the command cannot withdraw it. The transaction that applies a request stores
its answer, so that a killed run applies none twice. `<id>.answer` returns the answer to the command.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from sr_assets.adapters import times
from sr_assets.adapters.private import own_folder, write_private
from sr_assets.adapters.state.status_file import boot_id
from sr_assets.adapters.state.stream_tables import StreamTable

logger = logging.getLogger(__name__)

FOLDER: Final = "requests"
#: Requests that no run completed, and answers that no command read, are deleted after this time.
_KEPT_SECONDS: Final = 3600.0
Action = Literal["retire", "unretire"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request about a node of one stream. Ids are in the order of the requests.

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
    """One stream's applied requests whose files may still exist. Call the method that changes them in a transaction."""

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
    request_id = f"{times.time_ns():020}-{uuid.uuid4().hex}-{times.boot_seconds():.0f}-{_boot()}"
    request = Request(request_id, action, stream, node, reason, **origin)
    own_folder(folder / FOLDER)
    write_private(folder / FOLDER / f"{request.id}.json", json.dumps(asdict(request)))
    return request


def take_requests(folder: Path, stream: str) -> Iterator[Request]:
    """Take the open requests about a stream in order, including the requests that a killed run took."""
    at = folder / FOLDER
    if not at.exists():
        return
    for file in sorted([*at.glob("[0-9]*.json"), *at.glob("[0-9]*.taken")], key=lambda file: file.stem):
        if _age_seconds(file) > _KEPT_SECONDS:
            file.unlink(missing_ok=True)
            continue
        try:
            request = Request(**json.loads(file.read_text()))
            if request.stream == stream:
                file.rename(file.with_suffix(".taken"))
                yield request
        except FileNotFoundError:
            continue  # the command has withdrawn it
        except (ValueError, TypeError) as error:
            # Without it the command reports that nothing was changed.
            file.unlink(missing_ok=True)
            logger.warning("%s: is not a request (%s); it was deleted, repeat the command", file, error)


def _age_seconds(file: Path) -> float:
    """Return the age of a request or an answer, by a clock that no one sets, unless it is from before the machine's start."""
    created_ns, _, rest = file.stem.partition("-")
    _, _, since_boot = rest.partition("-")
    seconds, _, boot = since_boot.partition("-")
    if boot == _boot() and seconds.isdigit():
        return times.boot_seconds() - int(seconds)
    return times.time() - int(created_ns) / 1e9 if created_ns.isdigit() else 0.0


def _boot() -> str:
    return boot_id().partition("-")[0]


def answer_request(folder: Path, request: Request, answer: Answer) -> None:
    """Return the answer to the command, and remove the request."""
    at = folder / FOLDER
    for old in at.glob("*.answer"):
        # Other commands read and remove theirs meanwhile.
        if _age_seconds(old) > _KEPT_SECONDS:
            old.unlink(missing_ok=True)
    # The waiting command does not survive a power loss either.
    write_private(at / f"{request.id}.answer", json.dumps(asdict(answer)), durable=False)
    (at / f"{request.id}.taken").unlink(missing_ok=True)


def read_answer(folder: Path, request: Request) -> Answer | None:
    """Return the answer to a request once it exists, and remove it."""
    file = folder / FOLDER / f"{request.id}.answer"
    try:
        answer = Answer(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        answer = Answer(False, f"{file}: is not an answer; `sr-assets nodes` shows the result")
    file.unlink(missing_ok=True)
    return answer


def withdraw_request(folder: Path, request: Request) -> bool:
    """Withdraw a request; return False if a run has taken it."""
    try:
        (folder / FOLDER / f"{request.id}.json").unlink()
    except FileNotFoundError:
        return False
    return True
