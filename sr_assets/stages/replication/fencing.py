"""The life of a batch's fence: creation before its writers go to a cluster, deletion after all have ended or after a
crash.

A file next to the writers' locks names the fence for the next run.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.copying.fence import LAST_WRITE_SECONDS, forget_claims, make_fence, take_away
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.private import write_private

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster

logger = logging.getLogger(__name__)

_FILE: Final = "fence.json"


@contextlib.contextmanager
def fenced(plan: CopyPlan, folder: Path, target: Cluster, writers: int) -> Iterator[CopyPlan]:
    """Yield the plan with a fence for this many writers, and delete the fence after all of them succeeded.

    After a failure it stays, because some writers may be active; the next run settles it.
    """
    fence = {"stream": plan.stream, "fence": f"sr_assets_{plan.batch}", "writers": writers}
    # Write the name to disk before creating the fence: the next run must know the fence of a run that is killed in
    # between.
    write_private(folder / _FILE, json.dumps(fence))
    make_fence(target, plan.stream, str(fence["fence"]), plan.subjects)
    yield replace(plan, fence=str(fence["fence"]))
    settle_fence(folder, target)


def settle_fence(folder: Path, target: Cluster) -> None:
    """Delete the last batch's fence, if any, and wait until none of its writers can write.

    Raises TransientError if the target does not respond: then its content proves nothing.
    """
    file = folder / _FILE
    if not file.exists():
        return
    fence: dict[str, Any] = json.loads(file.read_text())
    if take_away(target, **fence):
        logger.warning(
            "%s: cluster writers were lost; waiting %g s until none of them can write",
            fence["stream"],
            LAST_WRITE_SECONDS,
        )
        times.sleep(LAST_WRITE_SECONDS)
        forget_claims(target, **fence)
    # Last: a run that is killed during the wait leaves the claims, so that the next run waits too.
    file.unlink()
