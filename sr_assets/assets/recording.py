"""The results of a site's run in Dagster: recorded when its entries have caught up, when a check result changes, and at the end.

A run lingers for minutes after it has caught up. It records its results before that, so that Dagster does not show its
assets as in progress.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.assets.checks import as_event
from sr_assets.assets.specs import ROW_COUNT, column_metadata, stream_key
from sr_assets.resources import HOST_KEY
from sr_assets.stages.report import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from sr_assets.assets.entries import EntryAssets
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation
Result = dg.MaterializeResult[None] | dg.AssetCheckResult | Event

#: The table whose columns each stage's asset has.
_TABLES: Final = {
    Stage.NODE_STATE: "node_availability",
    Stage.NODE_SNAPSHOTS: "node_snapshots",
    Stage.NODE_ADVISORIES: "node_advisories",
    Stage.REPLICA: "messages",
    Stage.ADVISORY_FEED: "global_availability",
}
#: A run is recorded after this time even if it has not caught up.
_FIRST_SECONDS: Final = 30.0
#: Interval at which a lingering run records changed check results.
_CHANGES_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The Dagster run that records a site's work, and the assets and checks to record.

    `hosted`: the site is a queued site of a host run, which did not plan these assets and records them as events.
    """

    instance: dg.DagsterInstance
    run_id: str
    mode: str | None
    asset_keys: AbstractSet[dg.AssetKey]
    check_keys: AbstractSet[dg.AssetCheckKey]
    hosted: bool = False


class Recorder:
    """The events that one run of a site records in Dagster.

    A step yields one result for each planned asset and check; later changes, and all of a hosted site, are events.
    """

    def __init__(self, site: Site, entries: Mapping[str, EntryAssets], run: RunRecord) -> None:
        self._site, self._entries, self._run = site, entries, run
        # Computed once: the digest covers the settings of all sites.
        self._digest = dg.MetadataValue.text(site.settings.digest[:12])
        self._next_check_at = time.monotonic() + _FIRST_SECONDS
        self._recorded: dict[dg.AssetKey, Mapping[str, Any]] = {}
        self._evaluated: dict[dg.AssetCheckKey, bool] = {}

    def due(self, *, caught_up: bool) -> bool:
        """Return whether to record the current state of the run."""
        return time.monotonic() >= self._next_check_at or (caught_up and not self.began)

    @property
    def hosted(self) -> bool:
        """Whether the site is a queued site of a host run."""
        return self._run.hosted

    @property
    def began(self) -> bool:
        """Whether anything is recorded yet."""
        return bool(self._recorded or self._evaluated)

    def record(self, reports: Mapping[str, StreamReport], *, ended: bool) -> Iterator[Result]:
        """Yield the results of the reports by stream; before the run has ended, only new assets and changed checks."""
        self._next_check_at = time.monotonic() + _CHANGES_SECONDS
        for stream, report in reports.items():
            assets = self._entries[stream]
            yield from self._materialise(assets, report, ended=ended)
            for check_result in assets.check_results(self._site, report, query_target=ended):
                yield from self._evaluate(check_result, ended=ended)

    def counts_of_failed(self, reports: Mapping[str, StreamReport]) -> dict[str, dict[str, int]]:
        """Return, by label, the counts of the entries that failed after their first commit."""
        failed = (report for report in reports.values() if report.failure and report.state is not None)
        return {report.stream.label: self._counts(report) for report in failed}

    def _counts(self, report: StreamReport) -> dict[str, int]:
        assets = self._entries[report.stream.stream]
        counted = Stage.REPLICA if Stage.REPLICA in assets.stages else Stage.ADVISORY_FEED
        metadata = assets.metadata(counted, self._site, report)
        return {name: value for name, value in metadata.items() if isinstance(value, int)}

    def _materialise(self, assets: EntryAssets, report: StreamReport, *, ended: bool) -> Iterator[Result]:
        """Yield an entry's assets, except for failed stages; before the end, only once the entry has a state."""
        if not ended and report.state is None:
            return
        for stage in assets.stages:
            key = stream_key(assets.entry, stage.value)
            earlier = self._recorded.get(key)
            if key not in self._run.asset_keys or stage in report.failed or (earlier is not None and not ended):
                continue
            metadata = {**assets.metadata(stage, self._site, report), "settings_digest": self._digest}
            if earlier == metadata:
                continue
            self._recorded[key] = metadata
            rows = assets.row_count(stage, self._site, report)
            whole = {**metadata, **column_metadata(_TABLES[stage]), ROW_COUNT: rows}
            if self._run.hosted:
                whole[HOST_KEY] = dg.MetadataValue.dagster_run(self._run.run_id)
            if earlier is None and not self._run.hosted:
                yield dg.MaterializeResult[None](key, metadata=whole)
            else:
                yield dg.AssetMaterialization(key, metadata=whole)

    def _evaluate(self, check_result: dg.AssetCheckResult, *, ended: bool) -> Iterator[Result]:
        event = as_event(check_result)
        key = event.asset_check_key
        earlier = self._evaluated.get(key)
        # A step must yield each planned check at its end; a hosted site has no plan.
        planned = ended and not self._run.hosted
        if key not in self._run.check_keys or (earlier == check_result.passed and not planned):
            return
        self._evaluated[key] = check_result.passed
        yield check_result if earlier is None and not self._run.hosted else event
