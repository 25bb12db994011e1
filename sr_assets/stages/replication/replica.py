"""Stage `replica`: one batch after the other from source to target, each done exactly once.

Here: whether there is a next range, and its intent. Not here: where a stream begins (`position`), what is done for the range
(`batch`), the target itself (`target`).

An intent is committed on its own before anything is done. After a crash the very same range is done again with the very
same cut-off: the fold gives the same decisions, the writers find in the target what is there already, and only the rest
is sent.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.state.store import Intent
from sr_assets.domain.positions import SequenceRange
from sr_assets.stages.replication.batch import Batch
from sr_assets.stages.replication.target import check_source, prepare_target
from sr_assets.stages.replication.target_history import refuse_other_writer, review_target
from sr_assets.stages.source.position import advance, load_position
from sr_assets.stages.source.reading import next_range

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport

logger = logging.getLogger(__name__)


def copy_batch(site: Site, stream: StreamSettings, report: StreamReport, ends: dict[str, int] | None) -> bool:
    """Copy the next batch, or finish the one that a crash left open; returns whether there was one.

    `ends` holds, when the run is to stop there, each source's last sequence as first seen by this run. Raises RunError
    or ConfigurationError with one line.
    """
    source = site.cluster(stream.source).stream_info(stream.stream)
    site.set_clock(source.ts_ns)
    if report.state is None:
        check_source(stream, source)
    end = source.last_sequence if ends is None else ends.setdefault(stream.stream, source.last_sequence)
    state = load_position(site, stream, source)
    # Once a run, after trouble, and when something is about to be written: a look each second is not worth its cost.
    if report.state is None or report.retries:
        review_target(site, stream, source, state)
        report.reached = True
    intent = _open_intent(site, stream)
    if intent is None:
        resend = bool(site.state.copy_log(stream.stream).resends(1))
        covered = _resend_range(site, stream) if resend else next_range(stream, state, source, end)
        if covered is None:
            _note_level(site, stream, state, source, report)
            return False
        if _changed_target(site, stream, state):
            review_target(site, stream, source, state)
            return True
        intent = _write_intent(site, stream, source, state, covered, resend=resend)
    started = time.monotonic()
    batch = Batch(site, stream, source, state, intent)
    messages = batch.run(report)
    _log_progress(stream, intent, messages, time.monotonic() - started, source, report)
    return True


def _open_intent(site: Site, stream: StreamSettings) -> Intent | None:
    """Return what a crash left open: sending again what the target lost goes first, unless a batch had begun by then."""
    resending, batch = (site.state.open_intent(stream.stream, resend=resend) for resend in (True, False))
    return resending or (None if batch is not None and batch.waits else batch)


def _changed_target(site: Site, stream: StreamSettings, state: StreamState) -> bool:
    """Tell whether a target that was written to has gone, was made again, or ends before our last copy."""
    if not state.target_created_ns:
        return False
    target = site.cluster(stream.target).find_stream(stream.target_stream)
    return (
        target is None or target.created_ns != state.target_created_ns or target.last_sequence < state.target_sequence
    )


def _resend_range(site: Site, stream: StreamSettings) -> SequenceRange:
    """Plan what is sent again next: it lies in a range, without filling it."""
    resends = site.state.copy_log(stream.stream).resends(stream.batch_messages)
    return SequenceRange(resends[0].covered.first, resends[-1].covered.next)


def _write_intent(
    site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState, covered: SequenceRange, *, resend: bool
) -> Intent:
    target = prepare_target(stream, source, site.cluster(stream.target))
    refuse_other_writer(stream, state, target)
    state.target_checked = target.last_sequence
    cutoff_ns = source.ts_ns - stream.max_age_ns if stream.max_age_ns is not None and source.ts_ns is not None else None
    available = min(max(covered.first, source.first_sequence), covered.next)
    numbers = (source.ts_ns, cutoff_ns, source.created_ns, target.created_ns, target.last_sequence)
    intent = Intent(stream.stream, covered.first, available, covered.next, *numbers, resend=resend)
    with site.state.transaction():
        site.state.save_stream(state)
        site.state.save_intent(intent)
    reach(Point.PLANNED)
    return intent


def _note_level(
    site: Site, stream: StreamSettings, state: StreamState, source: StreamInfo, report: StreamReport
) -> None:
    """Nothing to copy: time has passed all the same.

    It is committed when a node is due, else with the end of the run.
    """
    level = source.last_sequence < state.next_sequence
    advance(stream, state, source, level=level)
    report.state, report.lag_messages = state, state.lag_messages
    deadline_ns = site.state.next_deadline(stream.stream)
    if deadline_ns is not None and state.watermark_ns is not None and deadline_ns < state.watermark_ns:
        with site.state.transaction():
            site.state.save_stream(state)


def _log_progress(
    stream: StreamSettings, intent: Intent, messages: int, seconds: float, source: StreamInfo, report: StreamReport
) -> None:
    report.seconds += seconds
    left = max(0, source.last_sequence + 1 - intent.next)
    rate = messages / max(seconds, 1e-9)
    logger.info(
        "%s: [%d, %d) %d messages, %.0f/s, %d copied, %d left",
        stream.label,
        intent.first,
        intent.next,
        messages,
        rate,
        report.copied,
        left,
    )
