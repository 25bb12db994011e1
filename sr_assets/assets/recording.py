"""The results of a site's run in Dagster: once its entries have caught up, when a verdict changes, and as it ends.

A run lingers for minutes after it has caught up. Its assets are materialised and its checks evaluated before that, so that
Dagster shows them as they are, not in progress. Not here: what is recorded of an asset (`entries`), the run (`sites`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.assets.described import hours_recorded
from sr_assets.assets.streams import stream_key
from sr_assets.stages.report import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sr_assets.assets.entries import EntryAssets
    from sr_assets.domain.hours import Hours
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

Result = dg.MaterializeResult[None] | dg.AssetMaterialization | dg.AssetCheckResult | dg.AssetCheckEvaluation

#: A run that has not caught up by then is recorded too.
_FIRST_SECONDS: Final = 30.0
#: How often a lingering run looks whether a verdict has changed.
_LOOK_SECONDS: Final = 15.0


class Recorder:
    """What one run records of the assets and checks that were selected.

    Dagster takes one result of each from a step; what follows it is an event of its own.
    """

    def __init__(self, site: Site, entries: Mapping[str, EntryAssets], context: dg.AssetExecutionContext) -> None:
        """Take the site, its entries' assets by stream, and the step's context."""
        self._site, self._entries = site, entries
        self._keys, self._checks = context.selected_asset_keys, context.selected_asset_check_keys
        # Of the settings of all sites, so that it is computed once.
        self._digest = dg.MetadataValue.text(site.settings.digest[:12])
        self._look_at = time.monotonic() + _FIRST_SECONDS
        self._recorded: dict[dg.AssetKey, Mapping[str, dg.MetadataValue]] = {}
        self._instance = context.instance
        # As they were before this run, which may record an asset twice.
        self._hours: dict[dg.AssetKey, Hours] = {}
        self._evaluated: dict[dg.AssetCheckKey, bool] = {}

    def due(self, *, caught_up: bool) -> bool:
        """Return whether the run so far is to be recorded."""
        return time.monotonic() >= self._look_at or (caught_up and not self.began)

    @property
    def began(self) -> bool:
        """Whether anything is recorded yet."""
        return bool(self._recorded or self._evaluated)

    def record(self, reports: Mapping[str, StreamReport], *, ended: bool) -> Iterator[Result]:
        """Yield what is new in the reports by stream: of a run that goes on, assets once and verdicts when they change."""
        self._look_at = time.monotonic() + _LOOK_SECONDS
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
                key not in self._keys
                or stage in report.failed
                or (known is not None and not ended)
                or known == metadata
            ):
                continue
            self._recorded[key] = metadata
            whole = {**metadata, **self._page(assets, stage, report)}
            first = dg.MaterializeResult[None](key, metadata=whole)
            yield first if known is None else dg.AssetMaterialization(key, metadata=whole)

    def _page(self, assets: EntryAssets, stage: Stage, report: StreamReport) -> Mapping[str, Any]:
        key = stream_key(assets.entry, stage.value)
        if key not in self._hours:
            self._hours[key] = hours_recorded(self._instance, key)
        return assets.page(stage, self._site, report).metadata(self._hours[key], self._site.clock.now_ns())

    def _evaluate(self, verdict: dg.AssetCheckResult, *, ended: bool) -> Iterator[Result]:
        assert verdict.asset_key is not None
        assert verdict.check_name is not None
        key = dg.AssetCheckKey(verdict.asset_key, verdict.check_name)
        known = self._evaluated.get(key)
        if key not in self._checks or (known == verdict.passed and not ended):
            return
        self._evaluated[key] = verdict.passed
        if known is None:
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
