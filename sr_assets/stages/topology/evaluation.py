"""What is known of the native streams at a moment: one look, its report, drift and verdicts; and publishing it.

Here: what a tick of the sensor and a run of the job have in common. Not here: the rows (`report`), how Dagster records a
verdict (`assets.topology`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters.home import open_home
from sr_assets.adapters.published.index import Run
from sr_assets.adapters.published.manifest import LOCK_SECONDS
from sr_assets.adapters.published.publishing import publish_topology
from sr_assets.adapters.published.schema import TOPOLOGY_SITE
from sr_assets.adapters.state.lock import SiteBusyError, SiteLock, lock_owner
from sr_assets.adapters.state.status_file import write_status
from sr_assets.stages.clock import Clock
from sr_assets.stages.site import published_sites
from sr_assets.stages.topology.planning import NO_LEADER, find_drift, topology_of
from sr_assets.stages.topology.report import Report, link_record, make_report, stream_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets.domain.topology.drift import Drift
    from sr_assets.domain.topology.links import Link
    from sr_assets.domain.topology.wanted import WantedStream
    from sr_assets.settings import Settings
    from sr_assets.stages.topology.survey import ClusterSurvey, Survey

#: The checks of a native stream that has a mirror or sources; `DRIFT_CHECK` is for every native stream.
LINK_CHECKS: Final = {
    "link_active": "Each origin was heard of within 10 seconds, or within `io.nats.monitor.seen-critical`.",
    "link_caught_up": (
        "No message waits to be copied for more than 10 seconds, or `io.nats.monitor.seen-critical`;"
        " with `io.nats.monitor.lag-critical`: fewer messages wait than it says."
    ),
    "link_error": "No server reports an error of a link.",
}
DRIFT_CHECK: Final = {"no_drift": "The stream is as it is configured."}


class Verdict(NamedTuple):
    """Whether a check passes, why not, and whether that only warns."""

    passed: bool
    reason: str = ""
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one look: every row, and the verdicts on the configured streams, by label and check."""

    report: Report
    drift: list[tuple[WantedStream, Drift]]
    verdicts: dict[str, dict[str, Verdict]]

    def problems(self) -> dict[str, list[str]]:
        """Return which checks fail, by label: what a tick compares with the one before."""
        return {
            label: sorted(check for check, verdict in checks.items() if not verdict.passed)
            for label, checks in self.verdicts.items()
        }


def evaluate(settings: Settings, survey: Survey) -> Evaluation:
    """Return what a look that was taken says."""
    report, drift = make_report(settings, survey), list(find_drift(settings, survey))
    verdicts = {
        wanted.label: _verdicts(
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
    return Evaluation(report, drift, verdicts)


@contextmanager
def topology_lock(settings: Settings, owner: str, wait_seconds: float) -> Iterator[Path]:
    """Hold the right to change native streams and to publish their tables; yields the folder with what is remembered.

    Raises SiteBusyError when another process holds it for so long.
    """
    open_home(settings.home, settings.published_mode)
    folder = settings.home / "sites" / TOPOLOGY_SITE
    with ExitStack() as stack:
        try:
            stack.enter_context(SiteLock(folder, owner, wait_seconds))
        except SiteBusyError:
            holder = lock_owner(folder) or "another process"
            raise SiteBusyError(f"the native streams are locked by {holder}; try again when it has ended") from None
        yield folder


def publish_evaluation(settings: Settings, seen: Evaluation, run_id: str, wait_seconds: float = LOCK_SECONDS) -> None:
    """Publish the tables of what was seen; called inside the lock.

    Raises RunError when a site publishes for `wait_seconds` on; then the next publication shows these rows too.
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


def _verdicts(wanted: WantedStream, links: list[Link], drift: list[Drift], unasked: str | None) -> dict[str, Verdict]:
    verdicts: dict[str, Verdict] = {}
    if wanted.upstreams:
        dead = [f"{link.origin_stream}: {_silence(link)}" for link in links if link.dead]
        unknown = [f"{link.origin_stream}: unknown" for link in links if link.lag_messages is None]
        behind = [f"{link.origin_stream}: {link.lag_messages} messages behind" for link in links if link.behind]
        errors = [f"{link.origin_stream}: {link.error}" for link in links if link.error]
        verdicts = {
            "link_active": Verdict(not dead and bool(links), "; ".join(dead)),
            "link_caught_up": Verdict(not unknown and not behind, "; ".join([*behind, *unknown]), warns=not behind),
            "link_error": Verdict(not errors, "; ".join(errors)),
        }
    differs = [
        f"{difference.key}: wanted {difference.wanted}, found {difference.found} ({difference.remedy})"
        for difference in drift
    ]
    if unasked:
        differs = [unasked]
    return verdicts | {"no_drift": Verdict(not differs, "; ".join(differs))}


def _unknown(look: ClusterSurvey, wanted: WantedStream) -> str | None:
    """Return why it is not known how a stream is; None: it is."""
    if look.error:
        return f"cluster {look.name} cannot be asked"
    return NO_LEADER if wanted.stream in look.silent else None


def _silence(link: Link) -> str:
    return "never heard of" if link.active_seconds is None else f"silent for {link.active_seconds:.0f} s"


def remember_run(folder: Path, *, failed: bool) -> None:
    """Record whether the run that ended failed: the sensor decides by it when to request the next one."""
    write_status(folder, {"failed": failed})
