"""`heartbeats.json`: the counts of the publisher of the block `heartbeats`, for metrics."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from sr_assets.adapters.private import own_folder, write_private
from sr_assets.domain.errors import RunError

_FILE: Final = "heartbeats.json"


@dataclass(slots=True)
class HeartbeatCounts:
    """The attempts to publish a subject's heartbeats, the failed ones, and the seconds until the server's answers."""

    published: int = 0
    errors: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> dict[str, Self]:
        """Return the counts by subject; none if the publisher has not written any."""
        try:
            counts: dict[str, dict[str, Any]] = json.loads((folder / _FILE).read_text())
            return {subject: cls(**fields) for subject, fields in counts.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def write_counts(folder: Path, counts: dict[str, HeartbeatCounts]) -> None:
    """Replace the counts; a full disk loses them, because heartbeats matter more."""
    try:
        own_folder(folder)
        write_private(
            folder / _FILE, json.dumps({subject: asdict(count) for subject, count in counts.items()}), durable=False
        )
    except (OSError, RunError):
        return
