"""What a run prints when it fails."""

import os
import re
from pathlib import Path

import dagster as dg

from sr_assets import operate
from sr_assets.adapters.state.lock import SiteLock


def test_the_messages_of_a_busy_site_and_of_a_failure_reach_the_user(tmp_path: Path) -> None:
    @dg.op
    def busy() -> None:
        with SiteLock(tmp_path, "run 1", 0), SiteLock(tmp_path, "run 2", 0):
            pass

    @dg.op
    def failing() -> None:
        raise dg.Failure("london/A: gone\nlondon/B: gone too")

    @dg.job(executor_def=dg.in_process_executor)
    def both() -> None:
        busy()
        failing()

    with dg.DagsterInstance.ephemeral() as instance:
        lines = operate.failures(both.execute_in_process(instance=instance, raise_on_error=False).all_events)
    assert {"london/A: gone", "london/B: gone too"} < set(lines)
    assert any(
        re.fullmatch(rf"site {tmp_path.name} is under way: run 1 \(pid {os.getpid()}\) since \S+", line)
        for line in lines
    )
