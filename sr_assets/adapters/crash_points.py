"""Named points of a run, in the order of a batch; each calls an installed `hook`.

Only tests install a hook; no setting or environment variable does. Add a point where a crash leaves a state that no other
point leaves.
"""

from collections.abc import Callable
from enum import StrEnum


class Point(StrEnum):
    """A point in a run, in the order of a batch."""

    PLANNED = "planned"
    READ = "read"
    FOLDING = "folding"
    FOLDED = "folded"
    SWEPT = "swept"
    ANSWERING = "answering"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    COMMITTING = "committing"
    COMMITTED = "committed"
    PLACING_SNAPSHOTS = "placing_snapshots"
    REFILLING = "refilling"
    MERGED_HISTORY = "merged_history"
    REPLACED_HISTORY = "replaced_history"
    PUBLISHING_OUTBOX = "publishing_outbox"
    WRITTEN_TABLES = "written_tables"
    NOTED_TABLES = "noted_tables"
    PUBLISHING_TABLES = "publishing_tables"
    PUBLISHED_TABLES = "published_tables"


#: Called with each point that this process passes.
hook: Callable[[Point], None] | None = None


def reach(point: Point) -> None:
    """Call the hook, if there is one."""
    if hook is not None:
        hook(point)
