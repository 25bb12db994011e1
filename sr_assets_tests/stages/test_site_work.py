"""The work of a run that begins before the run."""

from concurrent.futures import Future

import pytest

from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.domain.errors import RunError
from sr_assets.stages.report import Stage
from sr_assets.stages.site import Site
from sr_assets.stages.site_work import SiteWork, head_start, work_of
from sr_assets_tests.rig import SITE, Rig, Sent


@pytest.fixture
def work(rig: Rig) -> SiteWork:
    """Return the work on a stream of three messages, which lingers."""
    stream = rig.make()
    rig.publish(stream, [Sent()] * 3)
    rig.add(stream)
    site = Site(rig.settings(linger="1h"), SITE, owner="test", run_id="test", wait_seconds=0)
    return SiteWork(site, {stream: frozenset(Stage)}, lingers=True)


def other() -> SiteWork:
    raise AssertionError("the work has begun")


class _Ready(Future[None]):
    """Becomes ready when the target has the copies, as seen by the work itself."""

    def __init__(self, work: SiteWork) -> None:
        super().__init__()
        self._work = work

    def done(self) -> bool:
        (report,) = self._work.run.reports_so_far().values()
        return report.copied == 3


def test_run_continues_its_head_start(rig: Rig, work: SiteWork) -> None:
    (stream,) = (entry.stream for entry in work.site.entries)
    with head_start("a run", lambda: work, _Ready(work)):
        assert len(rig.copies(stream)) == 3
        with work_of("a run", other) as taken:
            assert taken is work
            rig.publish(stream, [Sent()])
            for _ in taken.rounds:
                if taken.run.reports_so_far()[stream].copied == 4:
                    break
        # The run's end is the end of the work.
        assert lock_owner(work.site.folder) is None
    assert len(rig.copies(stream)) == 4
    assert is_published(rig.home, SITE)


def test_head_start_ends_with_its_process_unless_a_run_continues_it(rig: Rig, work: SiteWork) -> None:
    with pytest.raises(KeyboardInterrupt), head_start("a run", lambda: work, _Ready(work)):
        raise KeyboardInterrupt
    assert lock_owner(work.site.folder) is None
    assert is_published(rig.home, SITE)
    # Another run has no head start.
    with pytest.raises(AssertionError, match="has begun"):
        work_of("a run", other)


def test_run_raises_the_error_of_its_head_start(rig: Rig, work: SiteWork) -> None:
    with rig.open(), head_start("a run", lambda: work, Future()):
        with pytest.raises(RunError, match="LONDON is under way: test"):
            work_of("a run", other)
        with pytest.raises(AssertionError, match="has begun"):
            work_of("another run", other)
