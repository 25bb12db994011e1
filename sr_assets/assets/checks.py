"""The asset checks of streams and feeds: their specs, and their results from a run's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.adapters.state.records import CopyState
from sr_assets.assets.specs import stream_key
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import DAY_NS, format_rfc3339_ns
from sr_assets.domain.provenance import find_copy
from sr_assets.settings import FeedSettings, Settings, StreamSettings

if TYPE_CHECKING:
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

#: The check warns, or fails, after this many sensor intervals without progress while the source is ahead.
_WARN_INTERVALS: Final = 2
_FAIL_INTERVALS: Final = 10
_REPLICA_CHECKS: Final = {
    "no_gap": "No message was missing from the source in this run.",
    "in_order": "The target holds the copies in the source's order, if `order` is `stream`.",
    "no_loss": (
        "Seen messages = copied + queued + skipped + too old + parked + deleted before copying, and the target holds"
        " the last acknowledged copy."
    ),
    "path_alive": "Heartbeats arrive at their usual interval, if there are any.",
    "none_parked": "No message is parked: the target can store every message.",
    "progressing": "The position advances while the source is ahead.",
}
_FEED_CHECKS: Final = {
    "no_gap": "No message was missing from the stream in this run.",
    "advisories_understood": "No message was rejected (table `global_rejects`) within the last day.",
    "sites_watched": "No site is blind: no heartbeat is overdue.",
}
_MOST_NAMED: Final = 10


def stream_check_specs(settings: Settings, stream: StreamSettings) -> list[dg.AssetCheckSpec]:
    """Describe the checks of a replica and of a tracked stream's outbox."""
    checks, outbox = dict(_REPLICA_CHECKS), {}
    if stream.tracked:
        checks["senders_found"] = "Every message names its sender."
        outbox["advisories_published"] = "No advisory or event is waiting to be published."
    if stream.target_options:
        checks["no_drift"] = "The target matches the `target` block."
    return [
        *check_specs(stream_key(settings, stream, "replica"), checks),
        *check_specs(stream_key(settings, stream, "node_advisories"), outbox),
    ]


def feed_check_specs(settings: Settings, feed: FeedSettings) -> list[dg.AssetCheckSpec]:
    return check_specs(stream_key(settings, feed, "advisory_feed"), _FEED_CHECKS)


def check_specs(key: dg.AssetKey, descriptions: Mapping[str, str]) -> list[dg.AssetCheckSpec]:
    """Describe the checks of an asset, by name."""
    return [dg.AssetCheckSpec(name, asset=key, description=description) for name, description in descriptions.items()]


def as_event(result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """Return a check result as an event, which a run may record without having planned the check."""
    assert result.asset_key is not None
    assert result.check_name is not None
    return dg.AssetCheckEvaluation(
        result.asset_key,
        result.check_name,
        result.passed,
        metadata=result.metadata,
        severity=result.severity,
        description=result.description,
    )


def warning(
    key: dg.AssetKey, name: str, passed: bool, metadata: Mapping[str, Any], description: str | None = None
) -> dg.AssetCheckResult:
    """Return a check result that warns if it did not pass."""
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=name,
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
        metadata=metadata,
    )


def check_replica(
    site: Site, stream: StreamSettings, report: StreamReport, *, query_target: bool
) -> Iterator[dg.AssetCheckResult]:
    """Yield the check results of a replica; `query_target` checks the last copy in the target too."""
    key = stream_key(site.settings, stream, "replica")
    yield warning(key, "no_gap", report.gap_messages == 0, {"messages": report.gap_messages})
    in_order = report.disordered == 0 or stream.order != "stream"
    yield warning(key, "in_order", in_order, {"messages": report.disordered, "order": stream.order})
    yield _check_loss(site, stream, report, query_target=query_target)
    yield check_parked(site, stream)
    yield check_progress(site, stream, report)
    silent = site.state.heartbeats(stream.stream).silent(stream.name, site.clock.now_ns())
    missing = ", ".join(f"no heartbeat on {subject} for {age_ns / 1e9:.0f} s" for subject, age_ns in silent.items())
    yield warning(key, "path_alive", not silent, {"silent_subjects": len(silent)}, missing or None)
    if stream.target_options:
        drift = report.target_drift
        remedy = (
            f"{stream.target_stream}: {'; '.join(drift)}; change the stream, or the block `target`" if drift else None
        )
        yield warning(key, "no_drift", not drift, {"differences": len(drift)}, remedy)
    if stream.extractor is not None:
        without_sender = report.reasons.get("no_sender", 0)
        mostly = (
            f"{without_sender} of {report.messages} messages have no sender ({stream.extractor.key}:"
            f" {stream.extractor.text}); they are copied but track no node"
        )
        description = mostly if without_sender * 2 > report.messages else None
        yield warning(key, "senders_found", without_sender == 0, {"messages": without_sender}, description)


def check_parked(site: Site, stream: StreamSettings) -> dg.AssetCheckResult:
    """Return whether messages are parked: an error, because only an operator can have them copied."""
    parked, reason = site.state.parked_reason(stream.stream)
    remedy = (
        f"{parked} messages are not in the target, the last one because of: {reason}; change the target to accept them,"
        f" then run `sr-assets retry-parked --stream {stream.label}`"
    )
    return dg.AssetCheckResult(
        asset_key=stream_key(site.settings, stream, "replica"),
        check_name="none_parked",
        passed=not parked,
        severity=dg.AssetCheckSeverity.ERROR,
        description=remedy if parked else None,
        metadata={"messages": parked},
    )


def check_progress(site: Site, stream: StreamSettings, report: StreamReport) -> dg.AssetCheckResult:
    """Return whether the position of a stream that is behind advances; a failed stream's error is the description."""
    state = report.state
    behind = state is not None and state.progress_ns is not None and state.lag_messages > 0
    stalled_ns = site.clock.now_ns() - state.progress_ns if state and state.progress_ns and behind else 0
    intervals = stalled_ns / site.settings.sensor.interval_ns
    since_ns = state.last_error_since_ns if state else None
    error = f"{state.last_error} (since {format_rfc3339_ns(since_ns)})" if state and since_ns is not None else None
    return dg.AssetCheckResult(
        asset_key=stream_key(site.settings, stream, "replica"),
        check_name="progressing",
        passed=intervals <= _WARN_INTERVALS and report.wrong_clock is None,
        severity=dg.AssetCheckSeverity.ERROR if intervals > _FAIL_INTERVALS else dg.AssetCheckSeverity.WARN,
        description=error or report.wrong_clock,
        metadata={
            "stalled_seconds": round(stalled_ns / 1e9, 3),
            "lag_messages": report.lag_messages,
        },
    )


def _check_loss(site: Site, stream: StreamSettings, report: StreamReport, *, query_target: bool) -> dg.AssetCheckResult:
    key, state = stream_key(site.settings, stream, "replica"), report.state
    if state is None:
        return dg.AssetCheckResult(
            asset_key=key, check_name="no_loss", passed=True, description="no message has been read yet"
        )
    copying = report.copying or CopyState(stream.stream)
    accounted = state.skipped_messages + state.too_old_messages + copying.copied_messages + copying.parked_messages
    accounted += report.queued + copying.lost_messages
    problem = ""
    if accounted != state.seen_messages:
        problem = f"{state.seen_messages} seen, {accounted} accounted for"
    elif query_target:
        problem = _last_copy_problem(site, stream, report)
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="no_loss",
        passed=not problem,
        description=problem or None,
        metadata={"seen": state.seen_messages, "accounted": accounted},
    )


def _last_copy_problem(site: Site, stream: StreamSettings, report: StreamReport) -> str:
    """Return why the last copy in the target is wrong, or an empty text.

    A copy that was purged or has expired is not a problem, another message at its sequence is.
    """
    copying = report.copying
    if copying is None or copying.target_sequence == 0:
        return ""
    try:
        target = site.clusters.connect(stream.target)
        info = target.stream_info(stream.target_stream)
        if info.created_ns != copying.target_created_ns or info.first_sequence > copying.target_sequence:
            return ""
        if info.last_sequence < copying.target_sequence:
            return f"the target ends at {info.last_sequence}, before the last copy at {copying.target_sequence}"
        stored = target.message(stream.target_stream, copying.target_sequence)
    except RunError as error:
        return f"the target cannot be queried: {error}"
    identity = stream.identity
    copy = find_copy(stored.headers, identity, copying.created_ns) if stored else None
    if stored is not None and (copy is None or copy.sequence != copying.target_holds):
        return f"the target's {copying.target_sequence} is not the copy of {copying.target_holds}"
    return ""


def check_advisories(site: Site, stream: StreamSettings, report: StreamReport) -> dg.AssetCheckResult:
    """Return the check result of the outbox after a run."""
    key = stream_key(site.settings, stream, "node_advisories")
    reason = "; ".join(filter(None, (report.undeliverable, report.undeliverable_event))) or None
    return warning(key, "advisories_published", report.waiting == 0, {"waiting": report.waiting}, reason)


def check_feed(site: Site, report: StreamReport) -> Iterator[dg.AssetCheckResult]:
    """Yield the check results of a feed after a run."""
    key, state, stream = stream_key(site.settings, report.stream, "advisory_feed"), report.state, report.stream.stream
    yield warning(key, "no_gap", report.gap_messages == 0, {"messages": report.gap_messages})
    since_ns = (state.watermark_ns if state else None) or site.clock.now_ns()
    rejected = site.state.global_tables.rejects_since(stream, since_ns - DAY_NS)
    counts = {
        "last_day": rejected,
        "this_run": report.parked,
        "ever": report.copying.parked_messages if report.copying else 0,
    }
    yield warning(key, "advisories_understood", rejected == 0, counts)
    blind = site.state.global_tables.blind_sites(stream, state.watermark_ns if state else None)
    yield warning(key, "sites_watched", not blind, {"blind": len(blind)}, _blind_sites(blind))


def _blind_sites(blind: Sequence[tuple[str, int]]) -> str | None:
    """Return the first blind sites as text, from pairs of site and stream, and last heartbeat in unix ns."""
    if not blind:
        return None
    named = [f"{label} (last heartbeat {format_rfc3339_ns(alive_ns)[:19]}Z)" for label, alive_ns in blind[:_MOST_NAMED]]
    named += [f"{len(blind) - _MOST_NAMED} more"] if len(blind) > _MOST_NAMED else []
    return f"blind: {', '.join(named)}"
