"""The replay of a retained stream: what its transitions and copies would be under some durations, next to the record.

It reads the source and the published tables, and writes to no stream and no state, so a run may be active.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from sr_assets.adapters.connection_file import write_connection
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published.daily_rows import measure_days
from sr_assets.adapters.published.replay_record import Comparison, StreamRecord, open_comparison
from sr_assets.adapters.range_rows import RangeRead, Sightings
from sr_assets.adapters.spark.run_session import SparkConnection
from sr_assets.adapters.state.status_file import read_status
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.domain.blindness import BLINDING_REASONS, BlindSpans, Span
from sr_assets.domain.days import Day, date_at, dates_between, day_of
from sr_assets.domain.errors import ConfigurationError, RunError, cannot_write
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns, retention_begins_ns, watermark
from sr_assets.domain.senders import needs_payload
from sr_assets.domain.sizing import JOB_MESSAGES, reads_headers_only
from sr_assets.domain.tracking.replaying import RangeRules, Survey
from sr_assets.domain.tracking.rules import Event
from sr_assets.stages.clock import Clock
from sr_assets.stages.source.holes import Hole, find_holes, lost_sequences
from sr_assets.stages.source.position import CLOCKS_DIFFER_NS, changed_since, sequence_at
from sr_assets.stages.source.source_reading import average_bytes
from sr_assets.stages.source.suitability import check_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sr_assets.adapters.spark.replay_tasks import RangeRows
    from sr_assets.adapters.spark.run_session import SparkProvider
    from sr_assets.settings import Settings, StreamSettings

logger = logging.getLogger(__name__)

_CLIENT: Final = "sr-assets replay"
_MICROSECOND_NS: Final = 1_000
_MOST_PARTS: Final = 10_000
#: The most listed differences of a kind: with and without a reason.
MOST_LISTED: Final = 10_000
EVENTS: Final = tuple(event.value for event in Event)
#: The error about a feed.
FEED_REFUSED: Final = "a feed has no durations to replay; name a tracked stream"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted range, half-open, in unix ns, and durations instead of the configured ones; None is the default."""

    since_ns: int | None = None
    until_ns: int | None = None
    warn_ns: int | None = None
    inspect_ns: int | None = None
    verify: bool = False
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class DayCount:
    """The replayed and the recorded transitions of a day. Each is an advisory, unless a rule of an operator suppresses it."""

    date: date
    advisories: int
    recorded: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. `transitions` and `recorded` count by event, `totals` are those of `Comparison.totals`.

    `differences` have no reason, `explained` have one; None without a verification. `counted` are their numbers by reason.
    """

    name: str
    stream: str
    since_ns: int
    until_ns: int
    warn_ns: int
    inspect_ns: int
    totals: dict[str, int]
    transitions: dict[str, int]
    recorded: dict[str, int]
    days: list[DayCount]
    differences: list[dict[str, Any]] | None = None
    explained: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[str | None, int] = field(default_factory=dict)

    @property
    def both_sides(self) -> list[tuple[str, int, int]]:
        """The replayed and the recorded number of transitions by event, of copies, and of silent nodes at the end."""
        events = [(event, count, self.recorded[event]) for event, count in self.transitions.items()]
        return [*events, *((name, self.totals[name], self.totals[f"recorded_{name}"]) for name in ("copies", "silent"))]

    @property
    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        document = {
            "name": self.name,
            "stream": self.stream,
            "since": datetime.fromtimestamp(self.since_ns / 1e9, UTC),
            "until": datetime.fromtimestamp(self.until_ns / 1e9, UTC),
            "warn_duration_seconds": self.warn_ns / 1e9,
            "inspect_duration_seconds": self.inspect_ns / 1e9,
            **self.totals,
            "transitions": self.transitions,
            "recorded": self.recorded,
            "days": [{"date": day.date, "advisories": day.advisories, "recorded": day.recorded} for day in self.days],
        }
        if self.differences is not None:
            document |= {"differences": self.differences, "explained": self.explained}
        return document


@dataclass(frozen=True, slots=True)
class _Plan:
    """The range: its messages are `folded` from `begin_ns` on, so that the statuses at `since_ns` are known.

    `whole`: the tracking began at `begin_ns`. Otherwise at least `longest_ns` without blind time lie between both.
    """

    since_ns: int
    until_ns: int
    swept_ns: int
    begin_ns: int
    longest_ns: int
    folded: SequenceRange
    whole: bool


def replay(settings: Settings, stream: StreamSettings, wanted: Wanted, engine: SparkProvider) -> Replay:
    """Replay a range of a tracked stream; a large one on an engine.

    Raises ConfigurationError for a plain stream, for contradicting arguments and for a range that cannot be replayed, and
    RunError if the source cannot be read.
    """
    replayed = _with_durations(stream, wanted)
    # Each replay has a tag of its own: it interrupts no other replay of the stream.
    tag = f"replay {stream.label} {secrets.token_hex(4)}"
    with (
        tempfile.TemporaryDirectory(prefix="sr-assets-") as folder,
        open_comparison(settings.home, stream.name, stream.stream, Path(folder)) as comparison,
        closing(Cluster(stream.source, _CLIENT)) as cluster,
        closing(SparkConnection(engine, settings.spark.from_messages, tag)) as spark,
        _interrupted_on_errors(spark),
    ):
        source = cluster.stream_info(stream.stream)
        check_source(stream, source)
        record = comparison.stream_record()
        plan = _plan(settings, stream, replayed, wanted, record, cluster, source)
        recorded_spans = record.spans if record else BlindSpans()
        if record is not None:
            comparison.read_record(plan.begin_ns, plan.until_ns)
        with _rows(stream, source, plan, spark, Path(folder)) as (rows, parts):
            survey, holes = _survey(stream, cluster, source, plan, rows, parts)
            computed = survey.blind_spans(holes, plan.until_ns)
            spans = recorded_spans.add(computed)
            if changed_since(cluster, source):
                raise RunError(
                    f"source stream {stream.stream} was recreated or rolled back while it was read; repeat the replay"
                )
            plan = _after_losses(plan, wanted, survey, holes, spans)
            # Before the range, only the record knows when each node was copied.
            known = comparison.first_copies() if wanted.verify and not plan.whole else np.zeros(0, np.int64)
            _fold(replayed, plan, survey, spans, known, rows, comparison, lists_copies=wanted.verify)
        days = _days(settings, plan)
        result = _result(replayed, plan, comparison, days)
        if wanted.verify and record is not None:
            unseen = [span for span in computed if recorded_spans.blind_ns(*span) < span[1] - span[0]]
            _note_reasons(settings, stream, comparison, record, plan, survey, spans, unseen)
            result = _verified(comparison, result, plan, record, stream)
        if wanted.out is not None:
            _write(wanted.out, comparison, plan, days, spans)
    return result


@contextmanager
def _interrupted_on_errors(spark: SparkConnection) -> Iterator[None]:
    """Interrupt the engine's tasks if the block fails or the user ends the command."""
    try:
        yield
    except BaseException:
        spark.interrupt()
        raise


def _with_durations(stream: StreamSettings, wanted: Wanted) -> StreamSettings:
    """Return the stream with other durations; refuse a plain stream and contradicting arguments."""
    if stream.policy is None:
        raise ConfigurationError(
            f"{stream.label}: is not tracked, so there is nothing to replay; set inspect_duration and one of inspect_field,"
            " inspect_header and inspect_subject_token"
        )
    since_ns, until_ns = wanted.since_ns, wanted.until_ns
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise ConfigurationError(
            f"--since {format_rfc3339_ns(since_ns)} is not before --until {format_rfc3339_ns(until_ns)}; swap or correct them"
        )
    policy = stream.policy
    durations = {
        "warn_duration_ns": (wanted.warn_ns, policy.warning_ns),
        "inspect_duration_ns": (wanted.inspect_ns, policy.interval_ns),
    }
    changed = {key: ns for key, (ns, configured_ns) in durations.items() if ns is not None and ns != configured_ns}
    if not changed:
        return stream
    if wanted.verify:
        raise ConfigurationError(
            "--verify compares with the record under the configured durations; leave out --warn-duration and"
            " --inspect-duration"
        )
    inspect_ns = changed.get("inspect_duration_ns", policy.interval_ns)
    warn_ns = wanted.warn_ns or stream.warn_duration_ns or inspect_ns // 2
    if not 0 < warn_ns < inspect_ns:
        raise ConfigurationError(
            f"--warn-duration {warn_ns / 1e9:g}s must be shorter than --inspect-duration {inspect_ns / 1e9:g}s; set both"
        )
    replayed = stream.changed(warn_duration_ns=warn_ns, inspect_duration_ns=inspect_ns)
    try:
        _ = replayed.node_classes
    except ValueError as error:
        raise ConfigurationError(f"{stream.label}: {error}") from None
    return replayed


def _longest_ns(*streams: StreamSettings) -> int:
    """Return the longest `inspect_duration` of streams and their classes."""
    policies = [stream.policy_of(name) for stream in streams for name in (None, *stream.class_names)]
    return max(policy.interval_ns for policy in policies)


def _plan(
    settings: Settings,
    stream: StreamSettings,
    replayed: StreamSettings,
    wanted: Wanted,
    record: StreamRecord | None,
    cluster: Cluster,
    source: StreamInfo,
) -> _Plan:
    """Choose the range; refuse one that the source or the record does not cover."""
    if not source.messages or source.first_stored_ns is None:
        raise RunError(f"source stream {stream.stream} on {stream.source.label} is empty; there is nothing to replay")
    if wanted.verify and record is None:
        raise ConfigurationError(
            f"{stream.label}: nothing is recorded yet, so --verify has nothing to compare; run it once first"
        )
    until_ns, swept_ns = _until(stream, wanted, record, source)
    longest_ns, spans = _longest_ns(stream, replayed), record.spans if record else BlindSpans()
    # Before its first message that it still holds, the source may have lost others.
    first_ns, has_lost = source.first_stored_ns, source.first_sequence > 1
    tracked_ns = _cut(record.begin_ns if record else first_ns)
    is_held = record is None or not has_lost or tracked_ns >= _cut(first_ns)
    whole_from_ns = tracked_ns if is_held else None
    # With all of the longest interval before it, every status at the beginning is known.
    earliest_ns = tracked_ns if is_held else spans.exceeds_at_ns(first_ns, longest_ns)
    if record is not None and wanted.verify:
        forgotten_ns = retention_begins_ns(record.watermark_ns, settings.advisories.retention_ns)
        earliest_ns = max(earliest_ns, record.restarted_ns or 0, forgotten_ns if forgotten_ns > tracked_ns else 0)
    earliest_ns = _cut(earliest_ns + _MICROSECOND_NS - 1)
    since_ns = earliest_ns if wanted.since_ns is None else _cut(wanted.since_ns)
    if since_ns < earliest_ns and (earliest_ns != whole_from_ns or (record is None and has_lost)):
        lacking = "the source or the record" if wanted.verify else "the source"
        raise ConfigurationError(
            f"--since {format_rfc3339_ns(since_ns)}: {lacking} no longer has this time, or the {longest_ns / 1e9:g}s before it"
            f" (inspect_duration), which decide the statuses at it; use {format_rfc3339_ns(earliest_ns)} or later"
        )
    if max(since_ns, earliest_ns) >= until_ns:
        raise ConfigurationError(
            f"{stream.label}: there is nothing to replay from {format_rfc3339_ns(max(since_ns, earliest_ns))} on before"
            f" {format_rfc3339_ns(until_ns)}; use an earlier --since or a later --until, or let a run process newer messages"
        )
    begin_ns = _warmed_up(since_ns, longest_ns * (2 if wanted.verify else 1), spans)
    whole = whole_from_ns is not None and begin_ns <= whole_from_ns
    begin_ns = whole_from_ns if whole and whole_from_ns is not None else max(begin_ns, first_ns if has_lost else 0)
    first = sequence_at(cluster, source, begin_ns - (0 if whole else CLOCKS_DIFFER_NS))
    after = sequence_at(cluster, source, until_ns + CLOCKS_DIFFER_NS)
    if record is not None and until_ns <= record.known_ns:
        after = min(after, record.next_sequence)
    return _Plan(since_ns, until_ns, swept_ns, begin_ns, longest_ns, SequenceRange(first, max(first, after)), whole)


def _cut(time_ns: int) -> int:
    """Round a time down to microseconds, the resolution of the tables."""
    return time_ns // _MICROSECOND_NS * _MICROSECOND_NS


def _warmed_up(since_ns: int, watched_ns: int, spans: BlindSpans) -> int:
    """Return a time that is `watched_ns` before another one, without blind time."""
    begin_ns = since_ns - watched_ns
    while (earlier_ns := since_ns - watched_ns - spans.blind_ns(begin_ns, since_ns)) < begin_ns:
        begin_ns = earlier_ns
    return begin_ns


def _until(stream: StreamSettings, wanted: Wanted, record: StreamRecord | None, source: StreamInfo) -> tuple[int, int]:
    """Return the end of the range, and the time until which silence is known: by default those of the record.

    Without a record, or after it, they are those of a run that would have caught up now.
    """
    wanted_ns = wanted.until_ns
    if record is not None and (wanted.verify or wanted_ns is None or wanted_ns <= record.known_ns):
        latest_ns, watermark_ns, reason = record.known_ns, record.watermark_ns, "the record ends"
    else:
        current = watermark(
            source.ts_ns,
            source.last_stored_ns,
            replicas=source.replicas,
            warning_ns=stream.shortest_warning_ns,
            caught_up=True,
            mirror=source.mirror,
            previous_ns=None,
            own_clock_ns=Clock.own_ns(),
        )
        watermark_ns, reason = current.ns or 0, "the source's messages end"
        latest_ns = max(watermark_ns, Clock.credible_ns(source.last_stored_ns) or 0) + _MICROSECOND_NS
    until_ns = latest_ns if wanted_ns is None else wanted_ns
    if until_ns > latest_ns:
        raise ConfigurationError(
            f"--until {format_rfc3339_ns(until_ns)}: {reason} at {format_rfc3339_ns(latest_ns)}; use this time or an earlier"
            f" one{', or let a run process newer messages' if wanted.verify else ''}"
        )
    return _cut(until_ns), min(_cut(until_ns), watermark_ns)


@contextmanager
def _rows(
    stream: StreamSettings, source: StreamInfo, plan: _Plan, spark: SparkConnection, folder: Path
) -> Iterator[tuple[RangeRows, list[SequenceRange]]]:
    """Open the sightings of the folded range, in parts: by Spark if it is large, else in this process."""
    # With an engine, because they import Spark.
    from sr_assets.adapters.spark.replay_tasks import rows_here, rows_in_spark

    assert stream.extractor is not None  # settings require it of a tracked stream
    classifier = stream.node_classes.classifier if stream.node_classes else None
    messages, direct = len(plan.folded), source.supports_batched_direct_get
    payload_bytes = messages * average_bytes(source)
    needed = needs_payload(stream.extractor, stream.force_path, classifier)
    headers_only = reads_headers_only(payload_bytes, needed=needed, direct=direct and not stream.filter_subject)
    read = RangeRead(
        str(write_connection(folder / "connection.json", stream.source)),
        stream.stream,
        Sightings(stream.extractor, stream.force_path, classifier.rules if classifier else None),
        direct=direct,
        filter_subject=stream.filter_subject or None,
        headers_only=headers_only,
    )
    parts = plan.folded.split(min(_MOST_PARTS, -(-messages // JOB_MESSAGES)))
    with LongWork(f"{stream.label}: replaying", messages) as progress:
        in_spark = messages > 0 and spark.takes_range(messages, 0 if headers_only else payload_bytes)
        logger.info(
            "%s: replaying %d messages %s", stream.label, messages, "in Spark" if in_spark else "in this process"
        )
        if in_spark:
            parts = plan.folded.split(max(len(parts), spark.cores()))
        opened = (
            rows_in_spark(spark, read, parts, progress.reached)
            if in_spark
            else rows_here(read, parts, progress.reached)
        )
        with opened as rows:
            yield rows, parts


def _survey(
    stream: StreamSettings,
    cluster: Cluster,
    source: StreamInfo,
    plan: _Plan,
    rows: RangeRows,
    parts: Sequence[SequenceRange],
) -> tuple[Survey, list[Hole]]:
    """Return the survey of the folded range, and its holes."""
    from sr_assets.adapters.spark.replay_tasks import SurveyWork

    lost = lost_sequences(stream, cluster, source, plan.folded)
    firsts = np.array([part.first for part in parts], np.int64)
    known = None if lost is None else np.array(lost, np.int64)
    before = [-1] * len(parts)
    while True:
        survey = Survey(rows.survey(SurveyWork(firsts, tuple(before), plan.until_ns, known)))
        latest = survey.latest_before(len(parts))
        if latest == before:
            break
        # The first survey does not know the latest times of earlier parts yet.
        before = latest
    return survey, find_holes(stream, cluster, source, survey.absent(plan.folded))


def _after_losses(plan: _Plan, wanted: Wanted, survey: Survey, holes: Sequence[Hole], spans: BlindSpans) -> _Plan:
    """Return the plan without a beginning that messages decide which the source no longer held when it was read.

    Raises RunError if `--since` is in it.
    """
    lost = [hole for hole in holes if hole.reason in BLINDING_REASONS and hole.covered.first == plan.folded.first]
    # Messages before the first tracked one do not matter.
    if plan.whole and not (lost and plan.begin_ns < _cut(survey.first_ns)):
        return plan
    known_ns = spans.exceeds_at_ns(max(plan.begin_ns, survey.first_ns) if lost else plan.begin_ns, plan.longest_ns)
    if known_ns <= plan.since_ns:
        return plan
    since_ns = _cut(known_ns + _MICROSECOND_NS)
    if wanted.since_ns is not None or since_ns >= plan.until_ns:
        raise RunError(
            f"--since {format_rfc3339_ns(plan.since_ns)}: the source lost messages before this time, which decide the statuses"
            f" at it; use {format_rfc3339_ns(since_ns)} or later"
        )
    return replace(plan, since_ns=since_ns, whole=False)


def _fold(
    stream: StreamSettings,
    plan: _Plan,
    survey: Survey,
    spans: BlindSpans,
    known_copies: NDArray[np.int64],
    rows: RangeRows,
    comparison: Comparison,
    *,
    lists_copies: bool,
) -> None:
    """Fold the sightings of a stream that has the durations of the replay, and add the results to a comparison."""
    from sr_assets.adapters.spark.replay_tasks import FoldWork

    assert stream.policy is not None  # a plain stream is refused
    rules = RangeRules(
        stream.policy,
        stream.node_classes.policies if stream.node_classes else None,
        spans,
        plan.since_ns,
        plan.until_ns,
        plan.swept_ns,
        survey.times_ahead,
        known_copies,
        lists_copies,
    )
    for portion in rows.fold(FoldWork(rules)):
        comparison.add(portion)


def _days(settings: Settings, plan: _Plan) -> list[Day]:
    """Return the days of a range, in the time zone of the availability by day."""
    zone = settings.availability.timezone
    dates = dates_between(date_at(plan.since_ns, zone), date_at(plan.until_ns - 1, zone))
    return [day_of(each, zone) for each in dates]


def _result(stream: StreamSettings, plan: _Plan, comparison: Comparison, days: Sequence[Day]) -> Replay:
    """Return the counts of a replay of a stream that has the durations of the replay."""
    transitions, recorded = dict.fromkeys(EVENTS, 0), dict.fromkeys(EVENTS, 0)
    by_day = {day.date: [0, 0] for day in days}
    for day, event, *counts in comparison.count_events(plan.since_ns, days):
        for amounts, count in zip((transitions, recorded), counts, strict=True):
            amounts[event] += count
        by_day[day.date] = [total + count for total, count in zip(by_day[day.date], counts, strict=True)]
    assert stream.policy is not None  # a plain stream is refused
    return Replay(
        stream.name,
        stream.stream,
        plan.since_ns,
        plan.until_ns,
        stream.policy.warning_ns,
        stream.policy.interval_ns,
        comparison.totals(plan.since_ns),
        transitions,
        recorded,
        [DayCount(when, *amounts) for when, amounts in by_day.items()],
    )


def _note_reasons(
    settings: Settings,
    stream: StreamSettings,
    comparison: Comparison,
    record: StreamRecord,
    plan: _Plan,
    survey: Survey,
    spans: BlindSpans,
    lost: Sequence[Span],
) -> None:
    """Note the legitimate reasons of differences; `lost` are the blind spans of messages that were lost after they were read."""
    for reason, times in (("deleted_since", lost), ("wrong_clock", survey.unclear_times())):
        comparison.note_reason(reason, [(since, spans.exceeds_at_ns(until, plan.longest_ns)) for since, until in times])
    limits = {
        (event, name): limit_ns
        for name in (None, *stream.class_names)
        for policy in [stream.policy_of(name)]
        for event, limit_ns in ((Event.TIMEOUT, policy.warning_ns), (Event.EXPIRE, policy.interval_ns))
    }
    comparison.note_unusual_silences(limits, spans)
    comparison.note_late_holes(record.spans)
    if stream.purge_after_ns is not None:
        comparison.note_purged(record.watermark_ns - stream.purge_after_ns)
    status = read_status(settings.home / "sites" / stream.name).of(stream.stream)
    if status.counters.get(Counter.REFUSED_SENDERS):
        comparison.note_refused()


def _verified(
    comparison: Comparison, result: Replay, plan: _Plan, record: StreamRecord, stream: StreamSettings
) -> Replay:
    """Return a result with the differences from the record."""
    is_late = stream.max_age_ns is not None and record.too_old > 0
    comparison.find_differences(
        plan.since_ns, plan.begin_ns, all_copies=plan.whole, queued=record.queued, too_old_copies=is_late
    )
    return replace(
        result,
        differences=comparison.differences(explained=False, most=MOST_LISTED),
        explained=comparison.differences(explained=True, most=MOST_LISTED),
        counted=comparison.count_differences(),
    )


def _write(folder: Path, comparison: Comparison, plan: _Plan, days: Sequence[Day], spans: BlindSpans) -> None:
    """Write the Parquet files of a replay, both or none."""
    blind = pa.table(
        {
            "stream": pa.array([0] * len(spans.spans), pa.int32()),
            "first_ns": pa.array([first for first, _ in spans.spans], pa.int64()),
            "next_ns": pa.array([after for _, after in spans.spans], pa.int64()),
        }
    )
    drafts = {folder / f".{name}.parquet": folder / f"{name}.parquet" for name in ("transitions", "availability")}
    transitions, availability = drafts
    try:
        folder.mkdir(parents=True, exist_ok=True)
        comparison.write_transitions(transitions)
        comparison.write_availability(
            availability,
            days,
            plan.since_ns,
            plan.until_ns,
            lambda nodes: measure_days(nodes, blind, days),
        )
        for draft, file in drafts.items():
            draft.replace(file)
    except OSError as error:
        raise RunError(cannot_write(folder, error)) from None
    finally:
        with suppress(OSError):
            for draft in drafts:
                draft.unlink(missing_ok=True)
