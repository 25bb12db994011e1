"""A site's assets as one computation: the stages of all its entries, which one run materialises together or in any
part.

Here: running them and turning a run's reports into results. Not here: which assets an entry has (`entries`), the run
itself (`stages.run`).

They are one computation because a run lingers: it takes batch after batch through all stages of all entries, and is
recorded once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from sr_assets.assets.entries import EntryAssets, entry_assets
from sr_assets.assets.streams import stream_key
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, cannot_write
from sr_assets.resources import LINGER, MISCONFIGURED, MODE_TAG
from sr_assets.settings import Settings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site

Result = dg.MaterializeResult[None] | dg.AssetCheckResult


def build_site_assets(settings: Settings, name: str) -> dg.AssetsDefinition:
    """Return a site's assets with their checks; needs the resource `platform`."""
    entries = {entry.stream: entry_assets(entry) for entry in settings.sites[name]}
    group = settings.sites[name][0].asset_prefix[0]

    @dg.multi_asset(
        name=f"{group}_site",
        specs=[spec for assets in entries.values() for spec in assets.specs(settings.streams)],
        check_specs=[spec for assets in entries.values() for spec in assets.check_specs()],
        can_subset=True,
        required_resource_keys={"platform"},
    )
    def site_assets(context: dg.AssetExecutionContext) -> Iterator[Result]:
        # Spark's client is loaded by the run, so that loading the definitions stays quick.
        from sr_assets.stages.run import run_site

        platform, mode = context.resources.platform, context.run.tags.get(MODE_TAG)
        stages = {stream: assets.selected_stages(context.selected_asset_keys) for stream, assets in entries.items()}
        selection = {stream: chosen for stream, chosen in stages.items() if chosen}
        with _one_line_failures(platform.settings.home), platform.open_site(name, context.run_id, mode) as site:
            reports = run_site(site, selection, drain_only=mode != LINGER)
            results = [
                result
                for stream, report in reports.items()
                for result in _results(site, entries[stream], report, context)
            ]
        yield from results
        _raise_failures(reports)

    return site_assets


@contextmanager
def _one_line_failures(home: Path) -> Iterator[None]:
    """Turn what stops a whole run into a failure of one line."""
    try:
        yield
    except SrAssetsError as error:
        raise _failure([str(error)], misconfigured=isinstance(error, ConfigurationError)) from None
    except OSError as error:
        raise _failure([cannot_write(error.filename or home, error)], misconfigured=False) from None


def _raise_failures(reports: Mapping[str, StreamReport]) -> None:
    failures = [report.failure for report in reports.values() if report.failure]
    if failures:
        raise _failure(failures, misconfigured=any(report.misconfigured for report in reports.values()))


def _failure(lines: Sequence[str], *, misconfigured: bool) -> dg.Failure:
    """Return how a run fails: a line for each stream, and whether it is the configuration that has to change."""
    return dg.Failure("\n".join(lines), metadata={MISCONFIGURED: misconfigured}, allow_retries=False)


def _results(
    site: Site, assets: EntryAssets, report: StreamReport, context: dg.AssetExecutionContext
) -> Iterator[Result]:
    """Yield the results of what was selected of one entry. A stage that failed is not materialised.

    Its checks are reported in any case.
    """
    keys, checks = context.selected_asset_keys, context.selected_asset_check_keys
    for stage, metadata in assets.recorded(site, report):
        key = stream_key(assets.entry, stage.value)
        if key in keys and stage not in report.failed:
            yield dg.MaterializeResult(key, metadata={**metadata, "settings_digest": site.settings.digest[:12]})
    for verdict in assets.verdicts(site, report):
        if verdict.asset_key and dg.AssetCheckKey(verdict.asset_key, verdict.check_name or "") in checks:
            yield verdict
