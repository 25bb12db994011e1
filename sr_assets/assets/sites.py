"""A site's assets as one computation: a lingering run takes batch after batch through all stages of all entries.

A run lingers for minutes after it has caught up. It records its results before that, so that Dagster does not show its
assets as in progress. It records them again when a check result changes, and at the end.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.home import place_of
from sr_assets.adapters.spark.run_session import SparkResource
from sr_assets.assets.checks import as_event
from sr_assets.assets.entry_assets import EntryAssets, entry_assets, selected_stages
from sr_assets.assets.fleet import published_tables
from sr_assets.assets.host_run import HostedRun, HostRun, Result, run_limit
from sr_assets.assets.specs import ROW_COUNT, column_metadata, materialized, recorded, stream_key
from sr_assets.dagster_internals import tag_run
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, cannot_write
from sr_assets.resources import (
    DATA_TAG,
    HOME_TAG,
    HOST_KEY,
    LINGER,
    MISCONFIGURED,
    MODE_TAG,
    NOTED,
    Platform,
    platform_of,
    resource_keys,
    spark_of,
)
from sr_assets.settings import Settings, asset_name
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.site import Site

#: The table whose columns each stage's asset has.
_TABLES: Final = {
    Stage.NODE_STATE: "node_availability",
    Stage.NODE_SNAPSHOTS: "node_snapshots",
    Stage.NODE_ADVISORIES: "node_advisories",
    Stage.REPLICA: "messages",
    Stage.ADVISORY_FEED: "global_availability",
}
_OTHER_HOME: Final = (
    "the home {home} of this run is not its sensor's; start runs on the host of the sensor, with this folder mounted"
    " (docs/dagster.md#what-it-needs)"
)
#: A run is recorded after this time even if it has not caught up.
_FIRST_SECONDS: Final = 30.0
#: Interval at which a lingering run records changed check results.
_CHANGES_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The Dagster run that records a site's work, with its resource `spark`, and the assets and checks to record.

    `hosted`: the site is a queued site of a host run, which did not plan these assets and records them as events.
    """

    instance: dg.DagsterInstance
    run_id: str
    mode: str | None
    spark: SparkResource
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
        self._common: dict[str, Any] = {"settings_digest": dg.MetadataValue.text(site.settings.digest[:12])}
        if values := _dynamic_values(site.settings):
            self._common["data"] = dg.MetadataValue.json(values)
        self._next_check_at = times.monotonic() + _FIRST_SECONDS
        self._recorded: dict[dg.AssetKey, str] = {}
        self._evaluated: dict[dg.AssetCheckKey, bool] = {}

    def due(self, *, caught_up: bool) -> bool:
        """Return whether to record the current state of the run."""
        return times.monotonic() >= self._next_check_at or (caught_up and not self.began)

    @property
    def began(self) -> bool:
        """Whether anything is recorded yet."""
        return bool(self._recorded or self._evaluated)

    def record(self, reports: Mapping[str, StreamReport], *, ended: bool) -> Iterator[Result]:
        """Yield the results of the reports by stream: at the end, of changed assets; before, of new ones and changed checks."""
        self._next_check_at = times.monotonic() + _CHANGES_SECONDS
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
            key = stream_key(self._site.settings, assets.entry, stage.value)
            earlier = self._recorded.get(key)
            if key not in self._run.asset_keys or stage in report.failed or (earlier is not None and not ended):
                continue
            metadata, rows = assets.metadata(stage, self._site, report), assets.row_count(stage, self._site, report)
            version = assets.data_version(stage, report, metadata, rows)
            if earlier == version:
                continue
            self._recorded[key] = version
            whole = {**metadata, **self._common, **column_metadata(_TABLES[stage]), ROW_COUNT: rows}
            if self._run.hosted:
                whole[HOST_KEY] = dg.MetadataValue.dagster_run(self._run.run_id)
            if earlier is None and not self._run.hosted:
                yield materialized(key, whole, version)
            else:
                yield recorded(key, whole, version)

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


def _dynamic_values(settings: Settings) -> dict[str, str]:
    """Return the dynamic values of a run by `source/key`, without secrets."""
    origins = settings.loaded.dynamic if settings.loaded else {}
    return {label: origin.masked for label, origin in origins.items()}


def build_site_assets(settings: Settings, name: str) -> dg.AssetsDefinition:
    """Return a site's assets with their checks.

    Its runs record the shared tables too, which they publish. The site's job does not contain these tables: they depend on
    every site's assets, so each job, and each of its runs, would carry all sites.
    """
    specs, check_specs = _specs(settings, name)

    @dg.multi_asset(
        name=settings.dagster.name(f"{asset_name(name)}_site"),
        specs=specs,
        check_specs=check_specs,
        can_subset=True,
        required_resource_keys=resource_keys(settings, "platform", "spark"),
    )
    def site_assets(context: dg.AssetExecutionContext) -> Iterator[Result]:
        platform = platform_of(context, settings).current()
        spark = spark_of(context, settings)
        present, run_id, mode = platform.settings, context.run.run_id, context.run.tags.get(MODE_TAG)
        if (place := context.run.tags.get(HOME_TAG)) and place != place_of(present.home):
            raise _failure([_OTHER_HOME.format(home=present.home)], {}, misconfigured=True)
        keys, checks = context.selected_asset_keys, context.selected_asset_check_keys
        run = RunRecord(context.instance, run_id, mode, spark, keys, checks)
        if values := _dynamic_values(present):
            # A run that fails early records no metadata.
            tag_run(context.instance, run_id, {DATA_TAG: json.dumps(values)})
        limit, _ = run_limit(present, context.instance)
        host = HostRun(present, run_id, limit, partial(_serve, platform, run), context.log)
        yield from _run_site(platform, name, run, host)

    return site_assets


def _specs(settings: Settings, name: str) -> tuple[list[dg.AssetSpec], list[dg.AssetCheckSpec]]:
    """Return the specs of a site's assets and checks."""
    assets = [entry_assets(entry) for entry in settings.sites[name]]
    return [spec for each in assets for spec in each.specs(settings)], [
        spec for each in assets for spec in each.check_specs(settings)
    ]


def _serve(platform: Platform, run: RunRecord, name: str, hosted: HostedRun) -> Iterator[Result]:
    """Bring all assets of a queued site up to date in a host's `run`."""
    platform = platform.current()
    specs, check_specs = _specs(platform.settings, name)
    keys, checks = {spec.key for spec in specs}, {spec.key for spec in check_specs}
    yield from _run_site(platform, name, replace(run, asset_keys=keys, check_keys=checks, hosted=True), hosted)


def _run_site(platform: Platform, name: str, record: RunRecord, process: HostRun | HostedRun) -> Iterator[Result]:
    """Run the stages of a site's selected assets and yield the results for Dagster; raises dg.Failure at the end."""
    # Spark's client is loaded by the run, so that loading the definitions stays quick.
    from sr_assets.stages.site_work import SiteWork, work_of

    settings, lingers = platform.settings, record.mode == LINGER
    entries = {entry.stream: entry_assets(entry) for entry in settings.sites[name]}
    stages = {stream: selected_stages(settings, assets, record.asset_keys) for stream, assets in entries.items()}
    selection = {stream: chosen for stream, chosen in stages.items() if chosen}

    def begin() -> SiteWork:
        return SiteWork(platform.open_site(name, record.run_id, record.spark), selection, lingers=lingers)

    with _one_line_failures(settings.home), work_of(record.run_id, begin) as work, process.open(lingers=lingers):
        run, recorder, tables_recorded = work.run, Recorder(work.site, entries, record), record.hosted
        work.site.pace.sites_served = lambda: process.sites_served
        run.wanted = lambda: process.keep_running
        for caught_up in work.rounds:
            if process.stopping:
                break
            if lingers and recorder.due(caught_up=caught_up):
                # The shared tables only once, by the host.
                if not tables_recorded:
                    tables_recorded = yield from published_tables(settings, record.instance, ended=False)
                yield from recorder.record(run.reports_so_far(), ended=False)
            yield from process.results()
        work.rounds.close()
        results, numbers = list(recorder.record(run.reports, ended=True)), recorder.counts_of_failed(run.reports)
    yield from (*results, *process.results(ended=True))
    if not record.hosted:
        yield from published_tables(settings, record.instance)
    if failures := [report.failure for report in run.reports.values() if report.failure]:
        misconfigured = any(report.misconfigured for report in run.reports.values())
        raise _failure(failures, numbers, misconfigured=misconfigured, noted=True)


@contextmanager
def _one_line_failures(home: Path) -> Iterator[None]:
    """Turn an error that stops the whole run into a failure of one line."""
    try:
        yield
    except SrAssetsError as error:
        raise _failure([str(error)], {}, misconfigured=isinstance(error, ConfigurationError)) from None
    except OSError as error:
        raise _failure([cannot_write(error.filename or home, error)], {}, misconfigured=False) from None


def _failure(
    lines: Sequence[str], numbers: Mapping[str, Mapping[str, Any]], *, misconfigured: bool, noted: bool = False
) -> dg.Failure:
    """Return the failure of a run: a line and counts for each failed stream, and whether the configuration is wrong."""
    done = {label: dg.MetadataValue.json(values) for label, values in numbers.items()}
    return dg.Failure(
        "\n".join(lines), metadata={MISCONFIGURED: misconfigured, NOTED: noted, **done}, allow_retries=False
    )
