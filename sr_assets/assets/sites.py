"""A site's assets as one computation: the stages of all its streams, which one run materialises together or in any
part.

Here: which assets a site has, and turning a run's reports into results. Not here: each asset's words (`streams`,
`nodes`, `advisories`, `feeds`, `checks`), the run itself (`stages.site`).

They are one computation because a run lingers: it takes batch after batch through all stages of all streams, and is
recorded once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import dagster as dg

from sr_assets.assets.advisories import node_advisories_metadata, node_advisories_spec
from sr_assets.assets.checks import (
    advisories_check_spec,
    check_advisories,
    check_progress,
    check_replica,
    replica_check_specs,
)
from sr_assets.assets.feeds import check_feed, feed_check_specs, feed_metadata, feed_spec
from sr_assets.assets.nodes import node_snapshots_metadata, node_snapshots_spec, node_state_metadata, node_state_spec
from sr_assets.assets.streams import replica_metadata, replica_spec, stream_key
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, cannot_write
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.resources import LINGER, MISCONFIGURED, MODE_TAG
from sr_assets.settings import Entry, FeedSettings, Settings, StreamSettings
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.site import Site

_NEWEST = 10


def site_specs(entries: Sequence[Entry], streams: Sequence[StreamSettings]) -> list[dg.AssetSpec]:
    """Return the specs of a site's assets in flow order; `streams` are those of all sites."""
    specs = []
    for stream in entries:
        if isinstance(stream, FeedSettings):
            specs.append(feed_spec(stream, streams))
            continue
        specs.append(replica_spec(stream))
        if stream.tracked:
            specs += [node_snapshots_spec(stream), node_state_spec(stream), node_advisories_spec(stream)]
    return specs


def build_site_assets(settings: Settings, name: str) -> dg.AssetsDefinition:
    """Return a site's assets with their checks; needs the resource `platform`."""
    entries = settings.sites[name]
    checks = [spec for entry in entries for spec in _check_specs(entry)]

    @dg.multi_asset(
        name=f"{entries[0].asset_prefix[0]}_site",
        specs=[spec._replace(skippable=True) for spec in site_specs(entries, settings.streams)],
        check_specs=checks,
        can_subset=True,
        required_resource_keys={"platform"},
    )
    def site_assets(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        # Spark's client is loaded by the run, so that loading the definitions stays quick.
        from sr_assets.stages.run import run_site

        mode = context.run.tags.get(MODE_TAG)
        try:
            with context.resources.platform.open_site(name, context.run_id, mode) as site:
                reports = run_site(site, _selection(entries, context.selected_asset_keys), drain_only=mode != LINGER)
                results = [result for report in reports.values() for result in _results(site, report, context)]
        except SrAssetsError as error:
            raise _failure([str(error)], misconfigured=isinstance(error, ConfigurationError)) from None
        except OSError as error:
            home = context.resources.platform.settings.home
            raise _failure([cannot_write(error.filename or home, error)], misconfigured=False) from None
        yield from results
        failures = [report.failure for report in reports.values() if report.failure]
        if failures:
            raise _failure(failures, misconfigured=any(report.misconfigured for report in reports.values()))

    return site_assets


def _check_specs(entry: Entry) -> list[dg.AssetCheckSpec]:
    if isinstance(entry, FeedSettings):
        return feed_check_specs(entry)
    return [*replica_check_specs(entry), *([advisories_check_spec(entry)] if entry.tracked else [])]


def _failure(lines: Sequence[str], *, misconfigured: bool) -> dg.Failure:
    """Return how a run fails: a line for each stream, and whether it is the configuration that has to change."""
    return dg.Failure("\n".join(lines), metadata={MISCONFIGURED: misconfigured}, allow_retries=False)


def _selection(
    entries: Sequence[Entry], keys: set[dg.AssetKey] | frozenset[dg.AssetKey]
) -> dict[str, frozenset[Stage]]:
    """Return the stages that were asked for, by stream."""
    chosen: dict[str, set[Stage]] = defaultdict(set)
    for stream in entries:
        for stage in Stage:
            if stream_key(stream, stage.value) in keys:
                chosen[stream.stream].add(stage)
    return {stream: frozenset(stages) for stream, stages in chosen.items()}


def _results(
    site: Site, report: StreamReport, context: dg.AssetExecutionContext
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Yield the results of what was selected of one stream. A stream that failed is not materialised.

    Its checks are told all the same.
    """
    stream, keys, checks = report.stream, context.selected_asset_keys, context.selected_asset_check_keys
    for stage, metadata in _recorded(site, report):
        key = stream_key(stream, stage.value)
        if report.failure is None and key in keys:
            yield dg.MaterializeResult(key, metadata={**metadata, "settings_digest": site.settings.digest[:12]})
    if isinstance(stream, FeedSettings):
        verdicts = list(check_feed(site, report)) if report.failure is None else []
    else:
        verdicts = list(check_replica(site, report)) if report.failure is None else [check_progress(site, report)]
    if stream.tracked:
        verdicts.append(check_advisories(report))
    yield from (
        verdict
        for verdict in verdicts
        if verdict.asset_key and dg.AssetCheckKey(verdict.asset_key, verdict.check_name or "") in checks
    )


def _recorded(site: Site, report: StreamReport) -> list[tuple[Stage, Mapping[str, dg.MetadataValue]]]:
    """Return what is recorded of each stage's asset."""
    if isinstance(report.stream, FeedSettings):
        return [(Stage.ADVISORY_FEED, feed_metadata(report))]
    return [
        (Stage.REPLICA, replica_metadata(report)),
        (Stage.NODE_SNAPSHOTS, node_snapshots_metadata(report)),
        (Stage.NODE_STATE, node_state_metadata(report)),
        (Stage.NODE_ADVISORIES, node_advisories_metadata(report, _newest(site, report.stream))),
    ]


def _newest(site: Site, stream: StreamSettings) -> list[dict[str, object]]:
    return [
        {**row, "event_time": format_rfc3339_ns(row["event_ns"])}
        for row in site.state.outbox(stream.stream).newest(_NEWEST)
    ]
