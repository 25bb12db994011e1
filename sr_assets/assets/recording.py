"""The results of a site's run in Dagster: once its entries have caught up, when a verdict changes, and as it ends.

A run lingers for minutes after it has caught up. Its assets are materialised and its checks evaluated before that, so that
Dagster shows them as they are, not in progress. Not here: what is recorded of an asset (`entries`), the run (`sites`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.assets.described import hours_recorded
from sr_assets.assets.streams import stream_key
from sr_assets.resources import HOST_KEY
from sr_assets.stages.report import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from sr_assets.assets.entries import EntryAssets
    from sr_assets.domain.hours import Hours
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation
Result = dg.MaterializeResult[None] | dg.AssetCheckResult | Event

#: A run that has not caught up by then is recorded too.
_FIRST_SECONDS: Final = 30.0
#: How often a lingering run looks whether a verdict has changed.
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
        self._recorded: dict[dg.AssetKey, Mapping[str, dg.MetadataValue]] = {}
        # As they were before this run, which may record an asset twice.
        self._hours: dict[dg.AssetKey, Hours] = {}
        self._evaluated: dict[dg.AssetCheckKey, bool] = {}

    def due(self, *, caught_up: bool) -> bool:
        """Return whether the run so far is to be recorded."""
        return time.monotonic() >= self._next_check_at or (caught_up and not self.began)

    @property
    def began(self) -> bool:
        """Whether anything is recorded yet."""
        return bool(self._recorded or self._evaluated)

    def record(self, reports: Mapping[str, StreamReport], *, ended: bool) -> Iterator[Result]:
        """Yield what is new in the reports by stream: of a run that goes on, assets once and verdicts when they change."""
        self._next_check_at = time.monotonic() + _CHANGES_SECONDS
        for stream, report in reports.items():
            assets = self._entries[stream]
            yield from self._materialise(assets, report, ended=ended)
            for verdict in assets.verdicts(self._site, report, ask=ended):
                yield from self._evaluate(verdict, ended=ended)

    def numbers(self, reports: Mapping[str, StreamReport]) -> dict[str, dict[str, Any]]:
        """Return, by label, what is recorded of the copying or folding of each entry that failed after it had begun."""
        failed = (report for report in reports.values() if report.failure and report.state is not None)
        return {report.stream.label: self._counts(report) for report in failed}

    def _counts(self, report: StreamReport) -> dict[str, Any]:
        counted = (Stage.REPLICA, Stage.ADVISORY_FEED)
        recorded = self._entries[report.stream.stream].recorded(self._site, report)
        return {
            name: value.value
            for stage, metadata in recorded
            if stage in counted
            for name, value in metadata.items()
            if isinstance(value, dg.IntMetadataValue)
        }

    def _materialise(self, assets: EntryAssets, report: StreamReport, *, ended: bool) -> Iterator[Result]:
        """Yield the assets of an entry. A stage that failed is not materialised; one that never began only at the end."""
        if not ended and report.state is None:
            return
        for stage, described in assets.recorded(self._site, report):
            key = stream_key(assets.entry, stage.value)
            metadata = {**described, "settings_digest": self._digest}
            known = self._recorded.get(key)
            if (
                key not in self._run.asset_keys
                or stage in report.failed
                or (known is not None and not ended)
                or known == metadata
            ):
                continue
            self._recorded[key] = metadata
            whole = {**metadata, **self._page(assets, stage, report)}
            if self._run.hosted:
                yield dg.AssetMaterialization(
                    key, metadata={**whole, HOST_KEY: dg.MetadataValue.dagster_run(self._run.run_id)}
                )
            elif known is None:
                yield dg.MaterializeResult[None](key, metadata=whole)
            else:
                yield dg.AssetMaterialization(key, metadata=whole)

    def _page(self, assets: EntryAssets, stage: Stage, report: StreamReport) -> Mapping[str, Any]:
        key = stream_key(assets.entry, stage.value)
        if key not in self._hours:
            self._hours[key] = hours_recorded(self._run.instance, key)
        return assets.page(stage, self._site, report).metadata(self._hours[key], self._site.clock.now_ns())

    def _evaluate(self, verdict: dg.AssetCheckResult, *, ended: bool) -> Iterator[Result]:
        assert verdict.asset_key is not None
        assert verdict.check_name is not None
        key = dg.AssetCheckKey(verdict.asset_key, verdict.check_name)
        known = self._evaluated.get(key)
        if key not in self._run.check_keys or (known == verdict.passed and not ended):
            return
        self._evaluated[key] = verdict.passed
        if known is None and not self._run.hosted:
            yield verdict
            return
        yield dg.AssetCheckEvaluation(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=verdict.passed,
            metadata=verdict.metadata,
            severity=verdict.severity,
            description=verdict.description,
        )
