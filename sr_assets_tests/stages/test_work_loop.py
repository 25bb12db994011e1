"""A lane's steps and what is noted of their errors."""

from pathlib import Path

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import TransientError
from sr_assets.settings import FeedSettings
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.work_loop import WorkLoop


def test_the_first_step_that_succeeds_clears_what_an_earlier_run_ended_with(tmp_path: Path) -> None:
    entry = FeedSettings(name="centre", stream="ADV", source=ClusterSettings(("127.0.0.1:1",)))
    noted: list[str | None] = []
    lane = WorkLoop(
        StreamReport(entry), tmp_path, frozenset({Stage.ADVISORY_FEED}), on_error=noted.append, on_lost=lambda: None
    )

    def lost() -> bool:
        raise TransientError("gone")

    for step in (lambda: True, lambda: False, lost, lost, lambda: True, lambda: True):
        lane.attempt(step, final=lambda: False)
    assert noted == [None, "centre/ADV: gone", None]
