"""`retire` and `unretire`: a request to each stream that tracks a node, and a run if none is active."""

from collections.abc import Sequence
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.published import queries
from sr_assets.adapters.published.actions import origin
from sr_assets.adapters.state.lock import SiteBusyError, lock_owner
from sr_assets.adapters.state.operator_requests import (
    Action,
    Answer,
    leave_request,
    read_answer,
    withdraw_request,
)
from sr_assets.domain.errors import ConfigurationError, RunError, StandbyError, did_you_mean
from sr_assets.settings import Settings, StreamSettings
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site

_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1


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
    """Return the streams of one site that track a node."""
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
