"""The steps of a work loop and the errors it records."""

from pathlib import Path

from sr_assets.domain.errors import TransientError
from sr_assets.settings import FeedSettings
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.work_loop import WorkLoop


def test_first_successful_step_clears_the_previous_error(tmp_path: Path) -> None:
    entry = FeedSettings.model_validate({"name": "centre", "stream": "ADV", "url": "127.0.0.1:1"})
    errors: list[str | None] = []
    work_loop = WorkLoop(
        StreamReport(entry), tmp_path, frozenset({Stage.ADVISORY_FEED}), on_error=errors.append, on_lost=lambda: None
    )

    def fail() -> bool:
        raise TransientError("gone")

    for step in (lambda: True, lambda: False, fail, fail, lambda: True, lambda: True):
        work_loop.attempt(step, final=lambda: False)
    assert errors == [None, "centre/ADV: gone", None]
