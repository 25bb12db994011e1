"""A site's assets as one computation: a lingering run takes batch after batch through all stages of all entries."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from sr_assets.assets.entries import entry_assets, selected_stages
from sr_assets.assets.fleet import published_tables
from sr_assets.assets.host_run import HostedRun, HostRun, run_limit
from sr_assets.assets.recording import Recorder, Result, RunRecord
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, cannot_write
from sr_assets.resources import LINGER, MISCONFIGURED, MODE_TAG, NOTED, Platform
from sr_assets.settings import Settings
from sr_assets.stages.report import StreamReport

if TYPE_CHECKING:
    from sr_assets.stages.run import SiteRun


def build_site_assets(settings: Settings, name: str) -> dg.AssetsDefinition:
    """Return a site's assets with their checks.

    Its runs record the shared tables too, which they publish. The site's job does not contain these tables: they depend on
    every site's assets, so each job, and each of its runs, would carry all sites.
    """
    specs, check_specs = _specs(settings, name)
    group = settings.sites[name][0].asset_prefix[0]

    @dg.multi_asset(name=f"{group}_site", specs=specs, check_specs=check_specs, can_subset=True)
    def site_assets(context: dg.AssetExecutionContext, platform: Platform) -> Iterator[Result]:
        settings, run_id, mode = platform.settings, context.run.run_id, context.run.tags.get(MODE_TAG)
        run = RunRecord(context.instance, run_id, mode, context.selected_asset_keys, context.selected_asset_check_keys)
        limit, _ = run_limit(settings, context.instance)
        host = HostRun(settings, run_id, limit, partial(_serve, platform, run), context.log)
        yield from _run_site(platform, name, run, host)

    return site_assets


def _specs(settings: Settings, name: str) -> tuple[list[dg.AssetSpec], list[dg.AssetCheckSpec]]:
    """Return the specs of a site's assets and checks."""
    assets = [entry_assets(entry) for entry in settings.sites[name]]
    return [spec for each in assets for spec in each.specs(settings)], [
        spec for each in assets for spec in each.check_specs()
    ]


def _serve(platform: Platform, run: RunRecord, name: str, hosted: HostedRun) -> Iterator[Result]:
    """Bring all assets of a queued site up to date in a host's `run`."""
    specs, check_specs = _specs(platform.settings, name)
    keys, checks = {spec.key for spec in specs}, {spec.key for spec in check_specs}
    yield from _run_site(platform, name, replace(run, asset_keys=keys, check_keys=checks, hosted=True), hosted)


def _run_site(platform: Platform, name: str, record: RunRecord, process: HostRun | HostedRun) -> Iterator[Result]:
    """Run the stages of a site's selected assets and yield the results for Dagster; raises dg.Failure at the end."""
    # Spark's client is loaded by the run, so that loading the definitions stays quick.
    from sr_assets.stages.run import SiteRun

    settings, lingers = platform.settings, record.mode == LINGER
    entries = {entry.stream: entry_assets(entry) for entry in settings.sites[name]}
    stages = {stream: selected_stages(assets, record.asset_keys) for stream, assets in entries.items()}
    selection = {stream: chosen for stream, chosen in stages.items() if chosen}
    with (
        _one_line_failures(settings.home),
        platform.open_site(name, record.run_id, record.mode, lambda: process.sites_served) as site,
        process.open(lingers=lingers),
    ):
        run = SiteRun(site, selection, drain_only=not lingers, wanted=lambda: process.keep_running)
        recorder = Recorder(site, entries, record)
        with closing(run.rounds()) as rounds:
            for caught_up in rounds:
                if process.stopping:
                    break
                if lingers and recorder.due(caught_up=caught_up):
                    yield from _so_far(run, recorder, settings)
                yield from process.results()
        results, numbers = list(recorder.record(run.reports, ended=True)), recorder.counts_of_failed(run.reports)
    yield from (*results, *process.results(ended=True))
    if not record.hosted:
        yield from published_tables(settings)
    _raise_failures(run.reports, numbers)


def _so_far(run: "SiteRun", recorder: Recorder, settings: Settings) -> Iterator[Result]:
    """Record the current state of a run that continues; the shared tables only once, by the host."""
    if not recorder.began and not recorder.hosted:
        yield from published_tables(settings)
    yield from recorder.record(run.reports_so_far(), ended=False)


@contextmanager
def _one_line_failures(home: Path) -> Iterator[None]:
    """Turn an error that stops the whole run into a failure of one line."""
    try:
        yield
    except SrAssetsError as error:
        raise _failure([str(error)], {}, misconfigured=isinstance(error, ConfigurationError)) from None
    except OSError as error:
        raise _failure([cannot_write(error.filename or home, error)], {}, misconfigured=False) from None


def _raise_failures(reports: Mapping[str, StreamReport], numbers: Mapping[str, Mapping[str, Any]]) -> None:
    failures = [report.failure for report in reports.values() if report.failure]
    if failures:
        misconfigured = any(report.misconfigured for report in reports.values())
        raise _failure(failures, numbers, misconfigured=misconfigured, noted=True)


def _failure(
    lines: Sequence[str], numbers: Mapping[str, Mapping[str, Any]], *, misconfigured: bool, noted: bool = False
) -> dg.Failure:
    """Return the failure of a run: a line and counts for each failed stream, and whether the configuration is wrong."""
    done = {label: dg.MetadataValue.json(values) for label, values in numbers.items()}
    return dg.Failure(
        "\n".join(lines), metadata={MISCONFIGURED: misconfigured, NOTED: noted, **done}, allow_retries=False
    )
