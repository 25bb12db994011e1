"""Named points at which a test can hold a run still and kill it; in operation they cost a look into the environment.

Not here: the killing, which is done from outside with a real SIGKILL, as crashes are.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Final

#: `POINT:FILE`: at that point write our process id to FILE, which says that we may be killed now, and wait until it says
#: something else. A FILE that is there already holds nobody.
HOLD_VARIABLE: Final = "SR_ASSETS_HOLD"


class Point(StrEnum):
    """Where a run can be held, in the order of a batch."""

    PLANNED = "planned"
    READ = "read"
    FOLDING = "folding"
    FOLDED = "folded"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    COMMITTING = "committing"
    COMMITTED = "committed"
    PLACING_SNAPSHOTS = "placing_snapshots"
    PUBLISHING_OUTBOX = "publishing_outbox"
    PUBLISHING_TABLES = "publishing_tables"
    PUBLISHED_TABLES = "published_tables"


def reach(point: Point) -> None:
    """Go on, unless this is the point at which this process is to be held."""
    name, _, path = os.environ.get(HOLD_VARIABLE, "").partition(":")
    file = Path(path)
    if name != point or file.exists():
        return
    ours = str(os.getpid())
    file.write_text(ours)
    while file.exists() and file.read_text() == ours:
        time.sleep(0.1)
