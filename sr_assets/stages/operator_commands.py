"""The commands of operators that change a site: `checkpoint`, `retire`, `unretire`, and `retry-parked`."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published import queries
from sr_assets.adapters.published.actions import origin
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lock import SiteBusyError, lock_owner
from sr_assets.adapters.state.operator_requests import (
    Action,
    Answer,
    leave_request,
    read_answer,
    withdraw_request,
)
from sr_assets.adapters.state.orders import is_pending, request_checkpoint, withdraw_order
from sr_assets.adapters.state.status_file import outdate_status
from sr_assets.domain.errors import ConfigurationError, RunError, StandbyError, did_you_mean
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.settings import Settings, StreamSettings
from sr_assets.settings.election import CheckpointSettings
from sr_assets.stages.checkpointing import described, export_state, open_store, store_state
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site

_POLL_SECONDS: Final = 0.1
_WAIT_SECONDS: Final = 60.0


def save_site(settings: Settings, site: str, file: Path | None) -> str:
    """Write a checkpoint of a site now, into a file or the store; return the result as a line."""
    store, folder = settings.checkpoint_store(site), settings.home / "sites" / site
    if file is None and store is None:
        raise RunError(f"{site}: no store is configured; set `checkpoint`, or name a file with -o")
    if store is not None and lock_owner(folder) is not None and _request(settings, site, store):
        if file is not None:
            with open_store(store) as bucket:
                bucket.get(settings.checkpoint_name(site), file)
        return f"{site}: the active run has stored a checkpoint"
    with Site(settings, site, owner="checkpoint", run_id="checkpoint") as opened:
        if file is not None:
            about = export_state(settings, site, opened.state, file)
            return f"{site}: wrote a checkpoint of {file.stat().st_size:,} bytes into {file}: {described(about)}"
        assert store is not None
        store_state(settings, store, site, opened.state, opened.leadership.ensure)
    return f"{site}: stored a checkpoint"


def _request(settings: Settings, site: str, store: CheckpointSettings) -> bool:
    """Let the active run store a checkpoint; return False if it ended before."""
    folder = settings.home / "sites" / site
    before = last_stored(folder)
    request_checkpoint(settings, site)
    with LongWork(f"{site}: waiting for a checkpoint of the active run"):
        while lock_owner(folder) is not None:
            if not is_pending(folder, "checkpoint"):
                if last_stored(folder) == before:
                    raise RunError(
                        f"{store.cluster}: the active run could not store a checkpoint; its log has the reason"
                    )
                return True
            times.sleep(_POLL_SECONDS)
    withdraw_order(folder, "checkpoint")
    return last_stored(folder) != before


def act_on_node(settings: Settings, action: Action, node: str, site: str | None, reason: str = "") -> list[Answer]:
    """Retire or restore a node in every stream of its site that tracks it; return the answer of each stream.

    The run that applies a request records it in `operator_actions`, with the `reason`. Without an active run, this process
    reads the site's sources to their ends, applies the requests and publishes. A request that fails is withdrawn. Raises
    ConfigurationError if the site is unknown or must be named, and RunError if the node is unknown.
    """
    streams = _streams_of(settings, node, site)
    folder = settings.home / "sites" / streams[0].name
    by = origin()._asdict()
    requests = [leave_request(folder, action, stream.stream, node, reason, **by) for stream in streams]
    answers: list[Answer] = []
    open_requests, problem = requests, ""
    try:
        deadline = times.monotonic() + _WAIT_SECONDS
        while open_requests and not problem:
            times.sleep(_POLL_SECONDS)
            if times.monotonic() > deadline:
                problem = _not_applied(streams[0].name)
            elif lock_owner(folder) is None:
                problem = _run(settings, streams)
            read = {request.id: read_answer(folder, request) for request in open_requests}
            answers += filter(None, read.values())
            open_requests = [request for request in open_requests if read[request.id] is None]
    finally:
        taken = [request for request in open_requests if not withdraw_request(folder, request)]
    if open_requests:
        answers.append(Answer(False, _taken(streams[0].name) if taken else problem))
    return answers


def _run(settings: Settings, streams: Sequence[StreamSettings]) -> str:
    """Run the watch loops of some streams of a site; return the failure, or ""."""
    stages = frozenset({Stage.NODE_STATE, Stage.NODE_ADVISORIES})
    try:
        with Site(settings, streams[0].name, owner="retire", run_id="retire", wait_seconds=0.0) as site:
            reports = run_site(site, {stream.stream: stages for stream in streams}, drain_only=True)
    except SiteBusyError:
        return ""
    except StandbyError as error:
        return f"{streams[0].name}: {error}; run this command there"
    return "; ".join(report.failure for report in reports.values() if report.failure)


def _streams_of(settings: Settings, node: str, site: str | None) -> list[StreamSettings]:
    if site is not None and site not in settings.sites:
        hint = did_you_mean(site, settings.sites)
        raise ConfigurationError(f"--site {site}: is not configured; {hint}configured: {', '.join(settings.sites)}")
    labels = {"/".join(row[:2]) for row in queries.node_states(settings.home, node).values}
    streams = [stream for stream in settings.streams if stream.tracked and stream.label in labels]
    sites = sorted({stream.name for stream in streams})
    if site is None and len(sites) > 1:
        raise ConfigurationError(f"node {node!r} is at several sites; choose one with --site: {', '.join(sites)}")
    chosen = [stream for stream in streams if site in (None, stream.name)]
    if not chosen:
        raise RunError(_unknown(settings, node, site, sites))
    return chosen


def _unknown(settings: Settings, node: str, site: str | None, sites: Sequence[str]) -> str:
    if site is not None and sites:
        return f"node {node!r} is unknown at site {site}; it is known at: {', '.join(sites)}"
    reported = queries.global_node_states(settings.home, node)
    if elsewhere := sorted({"/".join(filter(None, row[:3])) for row in reported.values}):
        return f"node {node!r} is not tracked here but by {', '.join(elsewhere)}; run this command there"
    similar = " or ".join(map(repr, queries.similar_nodes(settings.home, node)))
    return f"node {node!r} is unknown; {f'did you mean {similar}?' if similar else '`sr-assets nodes` lists the nodes'}"


def _not_applied(site: str) -> str:
    return (
        f"{site}: no run reached the end of its sources within {_WAIT_SECONDS:g} s, so nothing was changed; try again when"
        " `sr-assets lag` shows no lag and no problem"
    )


def _taken(site: str) -> str:
    return (
        f"{site}: the run that took the request has not answered; if it ended, the next run completes the request;"
        " `sr-assets nodes` shows the result"
    )


def request_parked(settings: Settings, stream: StreamSettings) -> tuple[int, int]:
    """Let the next run copy the parked messages that the source still holds.

    Return their number, and the number of parked messages that the source no longer holds; those stay parked. Until the
    run, the requested messages count as copied; a message that the target refuses again is parked again.
    """
    with Site(settings, stream.name, owner="retry-parked", run_id="retry-parked") as site:
        store, log = site.state, site.state.copy_log(stream.stream)
        parked = store.parked(stream.stream)
        requested = {sequence for resend in log.resends() for sequence in _sequences(resend.covered)}
        again = [sequence for sequence in _held(stream, parked) if sequence not in requested]
        if again:
            copying = store.load_copying(stream.stream)
            copying.parked_messages -= len(again)
            copying.copied_messages += len(again)
            copying.copied_bytes += sum(parked[sequence][1] for sequence in again)
            with store.transaction():
                store.save_copying(copying)
                store.remove_parked(stream.stream, again)
                log.add_resends(merge_ranges(SequenceRange(n, n + 1) for n in again), was_copied=True)
            site.publish()
    if again:
        outdate_status(site.folder)
    return len(again), len(parked) - len(again)


def _held(stream: StreamSettings, parked: dict[int, tuple[int, int]]) -> list[int]:
    """Return the sequences at which the source holds the parked message, by its stored time."""
    if not parked:
        return []
    with wire.Connection(stream.source, "sr-assets retry-parked") as source:
        lists = wire.read_sequences(source, stream.stream, sorted(parked), direct=False)
        return [each.sequence for each in chain.from_iterable(lists) if parked[each.sequence][0] == each.stored_ns]


def _sequences(covered: SequenceRange) -> range:
    return range(covered.first, covered.next)
