"""Named points at which a test can hold a run still and kill it; in operation they cost a look into the environment.

Not here: the killing, which is done from outside with a real SIGKILL, as crashes are.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Final

#: `POINT:FILE`: at that point write FILE, which says that the process may be killed now, and wait until it is removed.
HOLD_VARIABLE: Final = "SR_ASSETS_HOLD"


class Point(StrEnum):
    """Where a run can be held, in the order of a batch."""

    PLANNED = "planned"
    READ = "read"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    COMMITTED = "committed"
    PLACING_SNAPSHOTS = "placing_snapshots"
    PUBLISHING_OUTBOX = "publishing_outbox"
    PUBLISHING_TABLES = "publishing_tables"


def reach(point: Point) -> None:
    """Go on, unless this is the point at which this process is to be held; a file that is there holds nobody again."""
    name, _, file = os.environ.get(HOLD_VARIABLE, "").partition(":")
    if name != point or Path(file).exists():
        return
    Path(file).write_text(str(os.getpid()))
    while Path(file).exists():
        time.sleep(0.1)
