"""A site's assets as one computation: the stages of all its streams, which one run materialises together or in any
part.

Here: which assets a site has, and turning a run's reports into results. Not here: each asset's words (`streams`,
`nodes`, `advisories`, `checks`), the run itself (`stages.site`).

They are one computation because a run lingers: it takes batch after batch through all stages of all streams, and is
recorded once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import dagster as dg

from sr_assets.assets.advisories import node_advisories_metadata, node_advisories_spec
from sr_assets.assets.checks import (
    advisories_check_spec,
    check_advisories,
    check_progress,
    check_replica,
    replica_check_specs,
)
from sr_assets.assets.nodes import node_snapshots_metadata, node_snapshots_spec, node_state_metadata, node_state_spec
from sr_assets.assets.streams import replica_metadata, replica_spec, stream_key
from sr_assets.domain.errors import ConfigurationError, SrAssetsError
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.resources import LINGER, MISCONFIGURED, MODE_TAG
from sr_assets.settings import StreamSettings
from sr_assets.stages.site import Site, Stage, StreamReport

_NEWEST = 10


def site_specs(streams: Sequence[StreamSettings]) -> list[dg.AssetSpec]:
    """Return the specs of a site's assets in flow order."""
    specs = []
    for stream in streams:
        specs.append(replica_spec(stream))
        if stream.tracked:
            specs += [node_snapshots_spec(stream), node_state_spec(stream), node_advisories_spec(stream)]
    return specs


def build_site_assets(name: str, streams: Sequence[StreamSettings]) -> dg.AssetsDefinition:
    """Return a site's assets with their checks; needs the resource `platform`."""
    checks = [spec for stream in streams for spec in replica_check_specs(stream)]
    checks += [advisories_check_spec(stream) for stream in streams if stream.tracked]

    @dg.multi_asset(
        name=f"{streams[0].asset_prefix[0]}_site",
        specs=[spec._replace(skippable=True) for spec in site_specs(streams)],
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
                reports = run_site(site, _selection(streams, context.selected_asset_keys), drain_only=mode != LINGER)
                results = [result for report in reports.values() for result in _results(site, report, context)]
        except SrAssetsError as error:
            raise _failure([str(error)], misconfigured=isinstance(error, ConfigurationError)) from None
        yield from results
        failures = [report.failure for report in reports.values() if report.failure]
        if failures:
            raise _failure(failures, misconfigured=any(report.misconfigured for report in reports.values()))

    return site_assets


def _failure(lines: Sequence[str], *, misconfigured: bool) -> dg.Failure:
    """Return how a run fails: a line for each stream, and whether it is the configuration that has to change."""
    return dg.Failure("\n".join(lines), metadata={MISCONFIGURED: misconfigured}, allow_retries=False)


def _selection(
    streams: Sequence[StreamSettings], keys: set[dg.AssetKey] | frozenset[dg.AssetKey]
) -> dict[str, frozenset[Stage]]:
    """Return the stages that were asked for, by stream."""
    chosen: dict[str, set[Stage]] = defaultdict(set)
    for stream in streams:
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
    recorded = [
        (Stage.REPLICA, replica_metadata(report)),
        (Stage.NODE_SNAPSHOTS, node_snapshots_metadata(report)),
        (Stage.NODE_STATE, node_state_metadata(report)),
        (Stage.NODE_ADVISORIES, node_advisories_metadata(report, _newest(site, stream))),
    ]
    for stage, metadata in recorded:
        key = stream_key(stream, stage.value)
        if report.failure is None and key in keys:
            yield dg.MaterializeResult(key, metadata={**metadata, "settings_digest": site.settings.digest[:12]})
    verdicts = list(check_replica(site, report)) if report.failure is None else [check_progress(site, report)]
    if stream.tracked:
        verdicts.append(check_advisories(report))
    yield from (
        verdict
        for verdict in verdicts
        if verdict.asset_key and dg.AssetCheckKey(verdict.asset_key, verdict.check_name or "") in checks
    )


def _newest(site: Site, stream: StreamSettings) -> list[dict[str, object]]:
    rows = site.state.connection.execute(
        "SELECT event, node, event_ns, late FROM transitions WHERE stream = ? ORDER BY event_ns DESC, node LIMIT ?",
        [stream.stream, _NEWEST],
    ).fetchall()
    return [
        {"event": event, "node": node, "event_time": format_rfc3339_ns(event_ns), "late": late}
        for event, node, event_ns, late in rows
    ]
