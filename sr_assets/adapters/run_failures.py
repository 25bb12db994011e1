"""`run_failures.json`: the last failure of each job whose run failed before it could record that in a site's state."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, write_private

_FILE: Final = "run_failures.json"


@dataclass(frozen=True, slots=True)
class RunFailure:
    """The last failed run of a job, and its streams.

    `since_ns` is when the first of the consecutive failures happened (unix ns). For a job that is not a site's, `streams`
    is empty and `name` is the job.
    """

    job: str
    run_id: str
    name: str
    streams: tuple[str, ...]
    reason: str
    since_ns: int


def read_run_failures(home: Path) -> dict[str, RunFailure]:
    """Return the last failure by job; empty if the file is missing or unreadable."""
    try:
        noted = json.loads((home / _FILE).read_text(encoding="utf-8"))
        return {failure["job"]: RunFailure(**{**failure, "streams": tuple(failure["streams"])}) for failure in noted}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def note_run_failure(home: Path, failure: RunFailure) -> None:
    """Replace the last failure of a job."""
    with _locked(home):
        _write(home, {**read_run_failures(home), failure.job: failure})


def forget_run_failure(home: Path, job: str) -> None:
    """Remove the failure of a job whose last run succeeded."""
    if job in read_run_failures(home):
        with _locked(home):
            failures = read_run_failures(home)
            failures.pop(job, None)
            _write(home, failures)


def _write(home: Path, failures: dict[str, RunFailure]) -> None:
    write_private(home / _FILE, json.dumps([asdict(failure) for failure in failures.values()]))


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the file's exclusive lock."""
    with open_private(home / f".{_FILE}.lock") as file:
        lock(file, None)
        yield
