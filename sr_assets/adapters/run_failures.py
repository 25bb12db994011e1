"""The last failure of each job whose run failed before it could record that in a site's state."""

import json
from dataclasses import astuple, dataclass
from pathlib import Path

from sr_assets.adapters import control


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
    """Return the last failure by job."""
    rows = control.query(home, "SELECT job, run_id, name, streams, reason, since_ns FROM run_failures ORDER BY rowid")
    return {
        job: RunFailure(job, run_id, name, tuple(json.loads(streams)), reason, since_ns)
        for job, run_id, name, streams, reason, since_ns in rows
    }


def note_run_failure(home: Path, failure: RunFailure) -> None:
    """Replace the last failure of a job."""
    values = [json.dumps(value) if isinstance(value, tuple) else value for value in astuple(failure)]
    control.change(home, "INSERT OR REPLACE INTO run_failures VALUES (?, ?, ?, ?, ?, ?)", *values)


def forget_run_failure(home: Path, job: str) -> None:
    """Remove the failure of a job whose last run succeeded."""
    if job in read_run_failures(home):
        control.change(home, "DELETE FROM run_failures WHERE job = ?", job)
