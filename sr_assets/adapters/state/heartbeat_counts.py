"""The counts of the publisher of the block `heartbeats`, for metrics."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sr_assets.adapters import control


@dataclass(slots=True)
class HeartbeatCounts:
    """The attempts to publish a subject's heartbeats, the failed ones, and the seconds until the server's answers."""

    published: int = 0
    errors: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> dict[str, Self]:
        """Return the counts by subject; none if the publisher has not written any."""
        home, site = control.place_of(folder)
        rows = control.query(home, "SELECT subject, published, errors, seconds FROM heartbeats WHERE site = ?", site)
        return {subject: cls(*counts) for subject, *counts in rows}


def write_counts(folder: Path, counts: dict[str, HeartbeatCounts]) -> None:
    """Replace the counts of these subjects. Raises RunError if it cannot."""
    home, site = control.place_of(folder)
    rows = [(site, subject, count.published, count.errors, count.seconds) for subject, count in counts.items()]
    with control.transaction(home, durable=False) as connection:
        connection.executemany("INSERT OR REPLACE INTO heartbeats VALUES (?, ?, ?, ?, ?)", rows)
