"""Evaluation of one survey: report, drift and check results of the native streams, and their publication.

The sensor's tick and the job's run share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters import control
from sr_assets.adapters.home import open_home
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.manifest import LOCK_SECONDS
from sr_assets.adapters.published.site_publishing import publish_topology
from sr_assets.adapters.published.tables import TOPOLOGY_SITE
from sr_assets.adapters.state.lock import SiteBusyError, SiteLock, lock_owner
from sr_assets.adapters.state.status_file import SiteStatus, write_status
from sr_assets.domain.topology.links import Link
from sr_assets.domain.topology.plan import Drift
from sr_assets.domain.topology.wanted import WantedStream
from sr_assets.settings import Settings
from sr_assets.stages.clock import Clock
from sr_assets.stages.site import published_sites
from sr_assets.stages.topology.link_rows import Report, link_record, make_report, stream_record
from sr_assets.stages.topology.planning import NO_LEADER, find_drift, topology_of

if TYPE_CHECKING:
    from sr_assets.stages.topology.survey import ClusterSurvey, Survey

#: The checks of a native stream with a mirror or sources; `DRIFT_CHECK` applies to every native stream.
LINK_CHECKS: Final = {
    "link_active": "The server heard from each origin within 10 seconds, or within `io.nats.monitor.seen-critical`.",
    "link_caught_up": (
        "No message waits to be copied for more than 10 seconds, or `io.nats.monitor.seen-critical`;"
        " with `io.nats.monitor.lag-critical`: fewer messages wait than it says."
    ),
    "link_error": "No server reports a link error.",
}
DRIFT_CHECK: Final = {"no_drift": "The stream matches its configuration."}


class CheckResult(NamedTuple):
    """Whether a check passes, the reason for a failure, and whether it is only a warning."""

    passed: bool
    reason: str = ""
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of one survey: every row, and the check results of the configured streams, by label and check."""

    report: Report
    drift: list[tuple[WantedStream, Drift]]
    check_results: dict[str, dict[str, CheckResult]]

    def problems(self) -> dict[str, list[str]]:
        """Return the failed checks by label, for comparison with the previous tick."""
        return {
            label: sorted(check for check, result in checks.items() if not result.passed)
            for label, checks in self.check_results.items()
        }


def evaluate(settings: Settings, survey: Survey) -> Evaluation:
    """Return the evaluation of a survey."""
    report, drift = make_report(settings, survey), list(find_drift(settings, survey))
    check_results = {
        wanted.label: _check_results(
            wanted,
            [
                link
                for link in report.links
                if link.native and (link.cluster, link.stream) == (wanted.cluster, wanted.stream)
            ],
            [difference for of, difference in drift if of is wanted],
            _unknown(survey.of[wanted.cluster], wanted),
        )
        for wanted in topology_of(settings).streams
    }
    return Evaluation(report, drift, check_results)


@contextmanager
def topology_lock(settings: Settings, owner: str, wait_seconds: float) -> Iterator[Path]:
    """Lock the native streams for changes and publication; yield the folder of the lock.

    Raises SiteBusyError if another process holds the lock for longer than `wait_seconds`.
    """
    open_home(settings.home, settings.published_mode)
    folder = settings.home / "sites" / TOPOLOGY_SITE
    with ExitStack() as stack:
        try:
            stack.enter_context(SiteLock(folder, owner, wait_seconds))
        except SiteBusyError:
            holder = lock_owner(folder) or "another process"
            raise SiteBusyError(f"the native streams are locked by {holder}; try again after it has ended") from None
        control.end_upgrade(folder)
        yield folder


def publish_evaluation(settings: Settings, seen: Evaluation, run_id: str, wait_seconds: float = LOCK_SECONDS) -> None:
    """Publish the tables of an evaluation, inside the lock.

    Raises RunError if a site publishes for longer than `wait_seconds`; the next publication then shows these rows too.
    """
    rows: dict[str, list[dict[str, Any]]] = {
        "topology_streams": [stream_record(row) for row in seen.report.streams],
        "topology_links": [link_record(link) for link in seen.report.links],
        "topology_drift": [
            {"cluster": wanted.cluster, "stream": wanted.stream, **drift._asdict()} for wanted, drift in seen.drift
        ],
    }
    times = [row.as_of_ns for row in seen.report.streams if row.as_of_ns is not None]
    run, sites = Run(max(times, default=Clock.own_ns()), run_id), published_sites(settings)
    publish_topology(
        settings.home,
        rows,
        sites=sites,
        run=run,
        mode=settings.published_mode,
        wait_seconds=wait_seconds,
    )


def _check_results(
    wanted: WantedStream, links: list[Link], drift: list[Drift], unavailable: str | None
) -> dict[str, CheckResult]:
    check_results: dict[str, CheckResult] = {}
    if wanted.upstreams:
        dead = [f"{link.origin_stream}: {_silence(link)}" for link in links if link.dead]
        unknown = [f"{link.origin_stream}: unknown" for link in links if link.lag_messages is None]
        behind = [f"{link.origin_stream}: {link.lag_messages} messages behind" for link in links if link.behind]
        errors = [f"{link.origin_stream}: {link.error}" for link in links if link.error]
        check_results = {
            "link_active": CheckResult(not dead and bool(links), "; ".join(dead)),
            "link_caught_up": CheckResult(not unknown and not behind, "; ".join([*behind, *unknown]), warns=not behind),
            "link_error": CheckResult(not errors, "; ".join(errors)),
        }
    differs = [
        f"{difference.key}: wanted {difference.wanted}, found {difference.found} ({difference.remedy})"
        for difference in drift
    ]
    if unavailable:
        differs = [unavailable]
    return check_results | {"no_drift": CheckResult(not differs, "; ".join(differs))}


def _unknown(surveyed: ClusterSurvey, wanted: WantedStream) -> str | None:
    """Return why a stream's state is unknown, or None if it is known."""
    if surveyed.error:
        return f"cluster {surveyed.name} is unreachable"
    return NO_LEADER if wanted.stream in surveyed.silent else None


def _silence(link: Link) -> str:
    return "never heard of" if link.active_seconds is None else f"silent for {link.active_seconds:.0f} s"


def remember_run(folder: Path, *, failed: bool) -> None:
    """Record whether the ended run failed; the sensor uses it to time the next run."""
    write_status(folder, SiteStatus(failed=failed))
