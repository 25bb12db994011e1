"""The file with the runs that failed before they could say so in a site's state: by job, the last such failure.

Here: the file. Not here: which failures are noted (`automation.failures`), who is notified (`operate.notify`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.private import write_private

if TYPE_CHECKING:
    from pathlib import Path

_FILE: Final = "run_failures.json"


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A job that fails: its last failed run, and the streams concerned.

    `since_ns`: when the first of these runs failed (unix ns).

    A job that is no site's has no streams, and its own name as `name`.
    """

    job: str
    run_id: str
    name: str
    streams: tuple[str, ...]
    reason: str
    since_ns: int


def read_run_failures(home: Path) -> dict[str, RunFailure]:
    """Return the last failure of each job that had one."""
    try:
        noted = json.loads((home / _FILE).read_text(encoding="utf-8"))
        return {failure["job"]: RunFailure(**{**failure, "streams": tuple(failure["streams"])}) for failure in noted}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def note_run_failure(home: Path, failure: RunFailure) -> None:
    """Replace the last failure of a job; only the sensor writes, so that nothing is lost between reading and writing."""
    known = {**read_run_failures(home), failure.job: failure}
    write_private(home / _FILE, json.dumps([asdict(failure) for failure in known.values()]))
