"""Asset checks: is anything missing, out of order, lost, unpublished or without a sender.

Here: their specs and verdicts, from a run's report. Not here: the counting (`stages`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from sr_assets.assets.streams import stream_key
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.domain.provenance import Identity, find_copy

#: Sensor intervals without progress, while the source is ahead, after which the check warns, and after which it fails.
_STALLED_INTERVALS = 2
_LOST_INTERVALS = 10

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport


def replica_check_specs(stream: StreamSettings) -> list[dg.AssetCheckSpec]:
    """Describe the checks of a replica."""
    key = stream_key(stream, "replica")
    specs = [
        dg.AssetCheckSpec(
            "no_gap", asset=key, description="The source held every sequence between where this run began and ended."
        ),
        dg.AssetCheckSpec("in_order", asset=key, description="Copies stand in the target in the source's order."),
        dg.AssetCheckSpec(
            "no_loss",
            asset=key,
            description=(
                "Seen = copied + skipped + too old + parked, and the last copy acknowledged is the one that stands in"
                " the target."
            ),
        ),
    ]
    specs.append(
        dg.AssetCheckSpec(
            "progressing", asset=key, description="The position moves as long as the source is ahead of it."
        )
    )
    if stream.tracked:
        specs.append(dg.AssetCheckSpec("senders_found", asset=key, description="Every message said who sent it."))
    return specs


def advisories_check_spec(stream: StreamSettings) -> dg.AssetCheckSpec:
    """Describe the check of the outbox."""
    return dg.AssetCheckSpec(
        "advisories_published",
        asset=stream_key(stream, "node_advisories"),
        description="No advisory waits to be published.",
    )


def check_replica(site: Site, report: StreamReport) -> Iterator[dg.AssetCheckResult]:
    """Yield the verdicts on a replica after a run."""
    stream = report.stream
    key, warn = stream_key(stream, "replica"), dg.AssetCheckSeverity.WARN
    yield dg.AssetCheckResult(
        asset_key=key,
        check_name="no_gap",
        passed=report.gap_messages == 0,
        severity=warn,
        metadata={"messages": report.gap_messages},
    )
    yield dg.AssetCheckResult(
        asset_key=key,
        check_name="in_order",
        passed=report.disordered == 0 or stream.order != "stream",
        severity=warn,
        metadata={"messages": report.disordered, "order": stream.order},
    )
    yield _check_loss(site, report)
    yield check_progress(site, report)
    if stream.tracked:
        unknown = report.reasons.get("no_sender", 0)
        yield dg.AssetCheckResult(
            asset_key=key,
            check_name="senders_found",
            passed=unknown == 0,
            severity=warn,
            metadata={"messages": unknown},
        )


def check_progress(site: Site, report: StreamReport) -> dg.AssetCheckResult:
    """Return whether a stream that is behind moves on; a warning after 2 sensor intervals without, an error after 10.

    Told of a stream that failed, too: with what keeps it, and since when.
    """
    key, state = stream_key(report.stream, "replica"), report.state
    behind = state is not None and state.progress_ns is not None and state.lag_messages > 0
    stalled_ns = site.now_ns() - state.progress_ns if state and state.progress_ns and behind else 0
    intervals = stalled_ns / site.settings.sensor.interval_ns
    since_ns = state.last_error_since_ns if state else None
    error = f"{state.last_error} (since {format_rfc3339_ns(since_ns)})" if state and since_ns is not None else None
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="progressing",
        passed=intervals <= _STALLED_INTERVALS,
        severity=dg.AssetCheckSeverity.ERROR if intervals > _LOST_INTERVALS else dg.AssetCheckSeverity.WARN,
        description=error,
        metadata={
            "stalled_seconds": round(stalled_ns / 1e9, 3),
            "lag_messages": state.lag_messages if state else report.lag_messages,
        },
    )


def _check_loss(site: Site, report: StreamReport) -> dg.AssetCheckResult:
    key, state = stream_key(report.stream, "replica"), report.state
    if state is None:
        return dg.AssetCheckResult(
            asset_key=key, check_name="no_loss", passed=True, description="Nothing was read yet."
        )
    accounted = state.copied_messages + state.skipped_messages + state.too_old_messages + state.parked_messages
    problem = "" if accounted == state.seen_messages else f"{state.seen_messages} seen, {accounted} accounted for"
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="no_loss",
        passed=not (problem := problem or _tail_problem(site, report)),
        description=problem or None,
        metadata={"seen": state.seen_messages, "accounted": accounted},
    )


def _tail_problem(site: Site, report: StreamReport) -> str:
    """Return what is wrong with our last copy in the target.

    It may have been purged or expired since, but not be another.
    """
    state, stream = report.state, report.stream
    if state is None or state.target_sequence == 0:
        return ""
    try:
        target = site.cluster(stream.target)
        info = target.stream_info(stream.target_stream)
        if info.created_ns != state.target_created_ns or info.first_sequence > state.target_sequence:
            return ""
        if info.last_sequence < state.target_sequence:
            return f"the target ends at {info.last_sequence}, before our copy at {state.target_sequence}"
        stored = target.message(stream.target_stream, state.target_sequence)
    except RunError as error:
        return f"the target cannot be asked: {error}"
    identity = Identity(stream.stream, stream.replicator, stream.name)
    copy = find_copy(stored.headers, identity) if stored else None
    if stored is not None and (copy is None or copy.sequence != state.target_holds):
        return f"the target's {state.target_sequence} is not our copy of {state.target_holds}"
    return ""


def check_advisories(report: StreamReport) -> dg.AssetCheckResult:
    """Return the verdict on the outbox after a run."""
    return dg.AssetCheckResult(
        asset_key=stream_key(report.stream, "node_advisories"),
        check_name="advisories_published",
        passed=report.waiting == 0,
        severity=dg.AssetCheckSeverity.WARN,
        description=report.undeliverable,
        metadata={"waiting": report.waiting},
    )
