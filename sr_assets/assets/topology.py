"""Native streams as assets `["topology", cluster, stream]`, linked to the sources and replicas of the entries."""

from collections.abc import Iterator, Mapping
from typing import Final

import dagster as dg

from sr_assets.adapters.logs import configure_logging
from sr_assets.assets.charts import graph_picture
from sr_assets.assets.checks import as_event, check_specs
from sr_assets.assets.specs import ROW_COUNT, column_metadata, common_spec, stream_key, topology_key
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.topology.graph import Graph, Node, around, graph_of
from sr_assets.domain.topology.plan import Action
from sr_assets.domain.topology.wanted import WantedStream
from sr_assets.resources import platform_of, resource_keys
from sr_assets.settings import Settings, TopologySettings
from sr_assets.stages.topology.evaluation import (
    DRIFT_CHECK,
    LINK_CHECKS,
    Evaluation,
    evaluate,
    publish_evaluation,
    remember_run,
    topology_lock,
)
from sr_assets.stages.topology.planning import apply_steps, await_links, make_plan, refused, topology_of
from sr_assets.stages.topology.survey import Survey

GROUP: Final = "topology"
#: A graph with more edges would be unreadable and large.
_MOST_DRAWN: Final = 60
#: Asset keys by cluster and stream.
_Keys = dict[tuple[str, str], list[dg.AssetKey]]
_DOCUMENT: Final = "configuration.md#native-mirrors-and-sources"


def build_topology_assets(settings: Settings) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """Return the native streams with their checks, and the origins that no other asset describes."""
    topology = topology_of(settings)
    origins = _origins(settings, topology)
    external = {key: spec for specs in origins.values() for key, spec in specs.items() if spec is not None}

    @dg.multi_asset(
        name=settings.dagster.name("native_streams"),
        specs=[_spec(settings, wanted, list(origins[wanted.label])) for wanted in topology.streams],
        check_specs=[
            spec
            for wanted in topology.streams
            for spec in check_specs(
                topology_key(settings, wanted.cluster, wanted.stream),
                {**(LINK_CHECKS if wanted.upstreams else {}), **DRIFT_CHECK},
            )
        ],
        can_subset=True,
        required_resource_keys=resource_keys(settings, "platform"),
    )
    def native_streams(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        platform = platform_of(context, settings)
        configured = platform.settings
        configure_logging(configured)
        try:
            seen, problems = _run(configured, context.run.run_id)
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        for wanted in topology.streams:
            key = topology_key(settings, wanted.cluster, wanted.stream)
            if key in context.selected_asset_keys:
                yield dg.MaterializeResult(
                    key, metadata=metadata(seen, wanted), check_results=_results(settings, seen, wanted)
                )
        if problems:
            raise dg.Failure("\n".join(problems), allow_retries=False)

    return [native_streams, *external.values()]


def evaluations(settings: Settings, seen: Evaluation, wanted: WantedStream) -> Iterator[dg.AssetCheckEvaluation]:
    """Return the check results of a stream as events without a run."""
    return map(as_event, _results(settings, seen, wanted))


def metadata(seen: Evaluation, wanted: WantedStream) -> Mapping[str, dg.MetadataValue]:
    """Return the metadata of a stream: its size, lag, differences from the configuration, and a graph of its links."""
    report = seen.report
    row = next(
        (stream for stream in report.streams if (stream.cluster, stream.stream) == (wanted.cluster, wanted.stream)),
        None,
    )
    links = [link for link in report.links if (link.cluster, link.stream) == (wanted.cluster, wanted.stream)]
    recorded: dict[str, dg.MetadataValue] = {}
    if row is not None:
        messages = dg.MetadataValue.int(row.messages or 0)
        recorded |= {
            **column_metadata("messages"),
            ROW_COUNT: messages,
            "messages": messages,
            "bytes": dg.MetadataValue.int(row.bytes or 0),
        }
    known = [link.lag_messages for link in links if link.lag_messages is not None]
    if known and len(known) == len(links):
        recorded["lag_messages"] = dg.MetadataValue.int(sum(known))
    drift = [difference._asdict() for of, difference in seen.drift if of.label == wanted.label]
    if drift:
        recorded["drift"] = dg.MetadataValue.json(drift)
    return recorded | {"picture": _picture(seen, wanted)}


def _run(settings: Settings, run_id: str) -> tuple[Evaluation, list[str]]:
    """Apply the configuration, evaluate and publish the result; also return the problems that remain."""
    with topology_lock(settings, f"run {run_id}", 60.0) as folder, Survey(settings) as survey:
        plan = make_plan(settings, survey.refresh())
        problems = list(plan.problems)
        if any(step.action is not Action.NONE for step in plan.steps):
            problems = problems or refused(survey, plan.steps)
            if not problems:
                outcomes = list(apply_steps(survey, plan.steps, settings.replicator))
                problems = [
                    f"{outcome.step.wanted.label}: {outcome.detail}" for outcome in outcomes if outcome.result != "done"
                ]
                await_links(survey, outcomes)
        seen = evaluate(settings, survey)
        publish_evaluation(settings, seen, run_id)
        remember_run(folder, failed=bool(problems))
    return seen, problems


def _origins(settings: Settings, topology: TopologySettings) -> dict[str, dict[dg.AssetKey, dg.AssetSpec | None]]:
    """Return, by stream, the assets that it copies from, with a spec if no other asset describes the origin."""
    wanted = {(stream.cluster, stream.stream) for stream in topology.streams}
    made, read = _of_entries(settings, topology)
    origins: dict[str, dict[dg.AssetKey, dg.AssetSpec | None]] = {}
    for stream in topology.streams:
        # The target of a replica may be a native stream too.
        keys: dict[dg.AssetKey, dg.AssetSpec | None] = dict.fromkeys(made.get((stream.cluster, stream.stream), ()))
        for upstream in stream.upstreams:
            origin = upstream.cluster, upstream.stream
            known = [topology_key(settings, *origin)] if origin in wanted else made.get(origin) or read.get(origin)
            if known:
                keys |= dict.fromkeys(known)
            else:
                keys[topology_key(settings, *origin)] = dg.AssetSpec(
                    topology_key(settings, *origin),
                    **common_spec(
                        settings,
                        GROUP,
                        {"nats"},
                        f"JetStream stream {upstream.stream} of {upstream.cluster}, outside this configuration.",
                        _DOCUMENT,
                    ),
                )
        origins[stream.label] = keys
    return origins


def _of_entries(settings: Settings, topology: TopologySettings) -> tuple[_Keys, _Keys]:
    """Return the replicas that fill a stream, and the source assets that describe it, by cluster and stream."""
    made: _Keys = {}
    read: _Keys = {}
    for entry in settings.entries:
        at = topology.cluster_of(entry.source)
        if at is not None and not (entry.kind == "feed" and settings.copied_into(entry)):
            read.setdefault((at.name, entry.stream), []).append(stream_key(settings, entry, "source"))
    for stream in settings.streams:
        to = topology.cluster_of(stream.target)
        if to is not None:
            made.setdefault((to.name, stream.target_stream), []).append(stream_key(settings, stream, "replica"))
    return made, read


def _spec(settings: Settings, wanted: WantedStream, deps: list[dg.AssetKey]) -> dg.AssetSpec:
    kind = "mirror" if wanted.mirror else "sources" if wanted.sources else "stream"
    of = ", ".join(f"{upstream.stream} of {upstream.cluster}" for upstream in wanted.upstreams)
    text = f"Stream {wanted.stream} of {wanted.cluster}: {kind}{' of ' * bool(of)}{of}, maintained by the servers."
    return dg.AssetSpec(
        topology_key(settings, wanted.cluster, wanted.stream),
        deps=deps,
        skippable=True,
        **common_spec(settings, GROUP, {"nats", kind}, text, _DOCUMENT),
    )


def _results(settings: Settings, seen: Evaluation, wanted: WantedStream) -> list[dg.AssetCheckResult]:
    return [
        dg.AssetCheckResult(
            asset_key=topology_key(settings, wanted.cluster, wanted.stream),
            passed=result.passed,
            check_name=name,
            severity=dg.AssetCheckSeverity.WARN if result.warns else dg.AssetCheckSeverity.ERROR,
            description=result.reason or None,
        )
        for name, result in seen.check_results[wanted.label].items()
    ]


def _picture(seen: Evaluation, wanted: WantedStream) -> dg.MarkdownMetadataValue:
    """Return the graph of the streams connected with one, as an image within Markdown."""
    domains = {row.cluster: row.domain for row in seen.report.streams if row.domain}
    node = Node(domains.get(wanted.cluster) or wanted.cluster, wanted.stream)
    graph = around(graph_of([(wanted.cluster, domains.get(wanted.cluster), wanted.stream)], seen.report.links), node)
    if len(graph.nodes) > _MOST_DRAWN:
        near = [edge for edge in graph.edges if node in (edge.origin, edge.copy)][:_MOST_DRAWN]
        graph = Graph(tuple(dict.fromkeys(end for edge in near for end in (edge.origin, edge.copy))), tuple(near))
    return graph_picture(graph)
