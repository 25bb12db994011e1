"""When a batch's fence is made and taken away: before its writers go to a cluster, after all have ended, or after a crash.

Here: the file beside the writers' locks by which a run knows the fence of one before it. Not here: what a fence is
(`adapters.copying.fence`), the batch (`writers`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.copying.fence import LAST_WRITE_SECONDS, forget_claims, make_fence, take_away
from sr_assets.adapters.private import write_private
from sr_assets.adapters.wire import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets.adapters.copying.plan import CopyPlan
    from sr_assets.settings import ClusterSettings

logger = logging.getLogger(__name__)

_FILE: Final = "fence.json"


@contextlib.contextmanager
def fenced(plan: CopyPlan, folder: Path, target: ClusterSettings, writers: int) -> Iterator[CopyPlan]:
    """Yield the plan with a fence for so many writers; it is taken away once all have ended with success.

    After a failure it stays: some may still write, and whoever comes next settles that.
    """
    fence = {"stream": plan.stream, "fence": f"sr_assets_{plan.batch}", "writers": writers}
    # On disk before it is in the target: a run that is killed in between leaves nothing behind that nobody knows.
    write_private(folder / _FILE, json.dumps(fence))
    with Connection(target, "sr-assets fence") as connection:
        make_fence(connection, plan.stream, str(fence["fence"]), plan.subjects)
    yield replace(plan, fence=str(fence["fence"]))
    settle_fence(folder, target)


def settle_fence(folder: Path, target: ClusterSettings) -> None:
    """Take the last batch's fence away, if there is one, and wait until none of its writers can write any more.

    Raises WireError when the target does not answer: then nothing may be concluded from what it holds.
    """
    file = folder / _FILE
    if not file.exists():
        return
    fence: dict[str, Any] = json.loads(file.read_text())
    with Connection(target, "sr-assets fence") as connection:
        may_write = take_away(connection, **fence)
    if may_write:
        logger.warning(
            "%s: writers on the cluster were cut off: waiting %g s until none of them can write any more",
            fence["stream"],
            LAST_WRITE_SECONDS,
        )
        time.sleep(LAST_WRITE_SECONDS)
        with Connection(target, "sr-assets fence") as connection:
            forget_claims(connection, **fence)
    # Last: a run that is killed while it waits leaves the claims, so that the next one waits too.
    file.unlink()
