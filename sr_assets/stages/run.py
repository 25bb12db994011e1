"""One run of a site: the cycles of its stages, how long they go round, and what is written down as they end.

Not here: what a stage does (`replica`, `node_state`, `node_advisories`, `node_snapshots`, `advisory_feed`), what a site
says of itself (`heartbeat`), what they share (`site`), what Dagster is told about it (`assets`).
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from typing import TYPE_CHECKING

from sr_assets.adapters.state.store import StreamState
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, TransientError, cannot_write
from sr_assets.settings import FeedSettings
from sr_assets.stages.feeds import advisory_feed
from sr_assets.stages.replication import replica
from sr_assets.stages.site import Stage, StreamReport
from sr_assets.stages.source.position import note_source
from sr_assets.stages.tracking import heartbeat, node_advisories, node_snapshots, node_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import Entry
    from sr_assets.stages.site import Site

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


def run_site(site: Site, selection: Mapping[str, frozenset[Stage]], *, drain_only: bool) -> dict[str, StreamReport]:
    """Go round the chosen stages of a site's streams and feeds until they are level; returns a report by stream.

    Then the run lingers: it looks at the sources every second and takes what comes, until nothing came for `linger` or
    `run_budget` is used up. With `drain_only` it stops where the sources were when it began. What may pass by itself, a
    lost connection say, is tried again within `run_budget`, ever more slowly; with `drain_only` only where the link was
    there before in this run, so that a wrong address is told at once. A stream that fails is left out from then on; the
    others go on. What was committed is published in any case, and a failed stream says why in its report and in
    `replication.last_error`.
    """
    streams = [entry for entry in site.entries if entry.stream in selection]
    reports = {stream.stream: StreamReport(stream) for stream in streams}
    began = active = time.monotonic()
    budget_ends = began + site.settings.run_budget_ns / 1e9
    linger_seconds = site.settings.linger_ns / 1e9
    ends: dict[str, int] = {}
    try:
        while True:
            busy = False
            for stream in streams:
                report = reports[stream.stream]
                if report.failure is None and time.monotonic() >= report.retry_at:
                    busy |= _go_round(site, stream, selection[stream.stream], report, ends if drain_only else None)
                    _weigh_trouble(
                        site, report, final=time.monotonic() > budget_ends or (drain_only and not report.reached)
                    )
            now = time.monotonic()
            if busy:
                active = now
            trying = any(report.trouble and not report.failure for report in reports.values())
            if all(report.failure for report in reports.values()) or (
                not drain_only and not trying and now > budget_ends
            ):
                break
            if not busy and not trying and (drain_only or now - active > linger_seconds):
                break
            site.publish(now=False, level=not busy)
            if not busy:
                time.sleep(_POLL_SECONDS)
        for stream in streams:
            if isinstance(stream, FeedSettings):
                continue
            if Stage.NODE_ADVISORIES in selection[stream.stream] and reports[stream.stream].failure is None:
                heartbeat.send_heartbeat(site, stream, reports[stream.stream])
            if Stage.NODE_SNAPSHOTS in selection[stream.stream]:
                node_snapshots.compact(site, stream)
    finally:
        for report in reports.values():
            _note_end(site, report)
        site.publish()
    return reports


def _go_round(
    site: Site, stream: Entry, stages: frozenset[Stage], report: StreamReport, ends: dict[str, int] | None
) -> bool:
    """Run a stream's stages once; returns whether there was anything to do. What goes wrong is noted in the report."""
    busy, report.trouble = False, None
    try:
        if isinstance(stream, FeedSettings):
            return Stage.ADVISORY_FEED in stages and advisory_feed.fold_feed(site, stream, report, ends)
        if Stage.REPLICA in stages:
            busy = replica.copy_batch(site, stream, report, ends)
        if Stage.NODE_SNAPSHOTS in stages:
            busy |= node_snapshots.index_staged(site, stream, report)
        if Stage.NODE_STATE in stages:
            busy |= node_state.sweep_due(site, stream, report)
        if Stage.NODE_ADVISORIES in stages:
            busy |= node_advisories.publish_outbox(site, stream, report)
            heartbeat.send_heartbeat(site, stream, report, busy=busy)
    except TransientError as error:
        report.trouble = _words(stream, error)
    except OSError as error:
        report.failure = f"{stream.label}: {cannot_write(error.filename or site.folder, error)}"
        logger.error("%s", report.failure)  # noqa: TRY400 - one line for the user
    except SrAssetsError as error:
        report.failure = _words(stream, error)
        report.misconfigured = isinstance(error, ConfigurationError)
        logger.error("%s", report.failure)  # noqa: TRY400 - one line for the user; the trace says nothing more
    return busy


def _words(stream: Entry, error: SrAssetsError) -> str:
    return str(error) if stream.label in str(error) else f"{stream.label}: {error}"


def _weigh_trouble(site: Site, report: StreamReport, *, final: bool) -> None:
    """Decide after a round what its trouble means: `final` trouble is a failure, any other is tried again, later."""
    if report.trouble is None:
        if report.retries:
            logger.info("%s: goes on after %d attempts", report.stream.label, report.retries)
            _note_error(site, report.stream.stream, None)
        report.retries = 0
        return
    if final:
        report.failure = report.trouble
        logger.error("%s", report.failure)
        return
    pause_seconds = min(_FIRST_PAUSE_SECONDS * 2.0**report.retries, _LONGEST_PAUSE_SECONDS)
    report.retries += 1
    report.retry_at = time.monotonic() + pause_seconds * random.uniform(0.5, 1.0)  # noqa: S311  jitter, not a secret
    logger.warning("%s; attempt %d in %.1f s", report.trouble, report.retries + 1, report.retry_at - time.monotonic())
    # A connection that a server has forgotten may look alive: none is trusted any more.
    site.disconnect()
    if report.retries == 1:
        _note_error(site, report.stream.stream, report.trouble)


def _note_error(site: Site, name: str, error: str | None) -> None:
    """Show what keeps a stream from going on, and since when, while the run goes on trying."""
    state = site.state.load_stream(name) or StreamState.not_begun(name)
    _set_error(site, state, error)
    with site.state.transaction():
        site.state.save_stream(state)
    site.changed()


def _set_error(site: Site, state: StreamState, error: str | None) -> None:
    state.last_error_since_ns = (state.last_error_since_ns or site.now_ns()) if error else None
    state.last_error = error


def _note_end(site: Site, report: StreamReport) -> None:
    """Write down how the run ended for a stream; also for one that never began, whose row then has no more than that."""
    name = report.stream.stream
    state = site.state.load_stream(name) or StreamState.not_begun(name)
    _set_error(site, state, report.failure)
    if report.alive_ns is not None:
        state.alive_ns, state.alive_due_ns = report.alive_ns, report.alive_due_ns
    if report.state is not None:
        state.watermark_ns, state.planned_ns = report.state.watermark_ns, report.state.planned_ns
        state.progress_ns = report.state.progress_ns
        state.source_last_sequence = report.state.source_last_sequence
        state.lag_messages = report.state.lag_messages
    if state.begun:
        _note_lag(site, report, state)
    state.as_of_ns = site.now_ns()
    with site.state.transaction():
        site.state.save_stream(state)
        if isinstance(report.stream, FeedSettings):
            advisory_feed.forget_old(site, report.stream)
        elif report.stream.retired_retention_ns is not None and state.watermark_ns is not None:
            site.state.drop_retired(name, state.watermark_ns - report.stream.retired_retention_ns)
    if state.begun:
        report.state = state
    report.waiting = site.state.outbox_size(name)


def _note_lag(site: Site, report: StreamReport, state: StreamState) -> None:
    """Note how far the stream is behind; a failed one is asked about anew, and stays as it was when nobody answers."""
    stream = report.stream
    with contextlib.suppress(SrAssetsError):
        cluster = site.cluster(stream.source)
        if report.failure is not None:
            source = cluster.stream_info(stream.stream)
            if source.created_ns != state.created_ns:
                return
            note_source(state, source)
        state.lag_ns = 0
        if state.lag_messages:
            unread = cluster.next_message(stream.stream, state.next_sequence, stream.filter_subject or ">")
            state.lag_ns = max(0, site.now_ns() - unread.stored_ns) if unread else 0
