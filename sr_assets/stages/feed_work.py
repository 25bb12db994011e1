"""The work on a feed during a run: folding its advisories, without copying."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.stages.entry_work import EntryWork
from sr_assets.stages.feeds.advisory_feed import FeedStage
from sr_assets.stages.report import Stage
from sr_assets.stages.source.reading import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from sr_assets.adapters.state.records import StreamState
    from sr_assets.settings import FeedSettings
    from sr_assets.stages.site import Site
    from sr_assets.stages.source.reading import Ends
    from sr_assets.stages.work_loop import WorkLoop


class FeedWork(EntryWork):
    """The work on a feed: folding its advisories, without copying."""

    def __init__(
        self, site: Site, feed: FeedSettings, stages: frozenset[Stage], final: Callable[[WorkLoop], bool]
    ) -> None:
        """Create the only stage."""
        super().__init__(site, feed, stages, final)
        self._feed = FeedStage(
            feed,
            site.state,
            site.clusters,
            Reader(site.spark, site.files),
            site.clock,
            self.report,
            most_feeds=len(site.settings.feeds),
        )

    def _watched_stages(self) -> frozenset[Stage]:
        return frozenset({Stage.ADVISORY_FEED})

    def step(self, ends: Ends) -> bool:
        """Fold the next batch."""
        if Stage.ADVISORY_FEED not in self._stages or not self.watching.due:
            return False
        busy = self.watching.attempt(lambda: self._feed.fold_next(ends), final=lambda: self._final(self.watching))
        if not busy or (ends is None and self._feed.caught_up):
            self.watching.rest(self._site.rest_seconds)
        return busy

    def _forget_old(self, state: StreamState) -> None:
        self._feed.forget_old(state, self._site.settings.advisories.retention_ns)
