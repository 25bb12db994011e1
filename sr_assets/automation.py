"""When things run: a lag sensor and a job for each site, and the nightly removal of old runs.

Here: asking JetStream whether there is something to do, and asking Dagster for a run. Not here: what a run does
(`stages`).

The sensors are level-triggered: they compare where a site stands (`status.json`) with what the sources say now. Nothing
is remembered between ticks but which run was seen without its lock, so a lost tick, a failed run or a restarted daemon
changes nothing.
"""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from sr_assets.adapters.nats.cluster import Cluster, StreamInfo
from sr_assets.adapters.state.store import lock_owner, read_status, status_age_seconds
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import watermark
from sr_assets.domain.subjects import advisory_subject
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets.settings import Entry, FeedSettings, Settings, StreamSettings, asset_name
from sr_assets.stages.site import needs_publishing

_UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
_WITHOUT_LOCK_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 300.0
_KEEP_RUNS = timedelta(days=7)
_KEEP_FAILED_RUNS = timedelta(days=30)
_DELETED_A_NIGHT = 5_000


def site_job_name(site: str) -> str:
    """Return the name of a site's job."""
    return f"{asset_name(site)}_replication"


def build_site_job(site: str) -> UnresolvedAssetJobDefinition:
    """Return the job that brings all of a site's assets, and the shared tables, up to date in one process."""
    selection = dg.AssetSelection.groups(asset_name(site)) | dg.AssetSelection.groups("fleet")
    return dg.define_asset_job(
        site_job_name(site),
        selection=selection,
        description=f"Replicate, track and advise for every stream of site {site}.",
        executor_def=dg.in_process_executor,
    )


def build_lag_sensor(settings: Settings, site: str, job: UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """Return the sensor that asks for a run of a site whenever there is something to do for it."""

    @dg.sensor(
        name=f"{asset_name(site)}_lag",
        job=job,
        minimum_interval_seconds=max(1, settings.sensor.interval_ns // 1_000_000_000),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Runs site {site} when a source is ahead, a node's deadline has passed, or advisories can be delivered"
            " again."
        ),
    )
    def lag_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        folder = settings.home / "sites" / site
        owner = lock_owner(folder)
        waiting, cursor = _run_under_way(context, site_job_name(site), holds_lock=owner is not None)
        if owner or waiting:
            return dg.SensorResult(skip_reason=f"under way: {owner or waiting}", cursor=cursor)
        reason, skip = find_work(settings, site)
        if reason is None:
            return dg.SensorResult(skip_reason=skip, cursor=cursor)
        return dg.SensorResult(
            run_requests=[dg.RunRequest(tags={MODE_TAG: LINGER, "sr_assets/reason": reason[:200]})], cursor=cursor
        )

    return lag_sensor


def _run_under_way(context: dg.SensorEvaluationContext, job: str, *, holds_lock: bool) -> tuple[str | None, str]:
    """Return which run of the job is on its way, if any, and the cursor: since when which run was seen without its
    lock.

    A run that says STARTED but does not hold its site's lock for a minute has no process any more: it is reported
    failed.
    """
    seen: dict[str, float] = json.loads(context.cursor) if context.cursor else {}
    # Not the time of day: were that set forward, a run that is just starting would look as old.
    now, still, waiting = time.monotonic(), {}, None
    for run in context.instance.get_runs(filters=dg.RunsFilter(job_name=job, statuses=_UNDER_WAY), limit=10):
        waiting = f"run {run.run_id} is {run.status.value.lower()}"
        if run.status is not dg.DagsterRunStatus.STARTED or holds_lock:
            continue
        since = min(seen.get(run.run_id, now), now)
        if now - since > _WITHOUT_LOCK_SECONDS:
            context.instance.report_run_failed(run, "the run's process is gone: it does not hold its site's lock")
            waiting = None
        else:
            still[run.run_id] = since
    return waiting, json.dumps(still)


def find_work(settings: Settings, site: str) -> tuple[str | None, str]:
    """Return why a site needs a run (None when it does not), and the words for not needing one.

    Raises RunError when no source could be asked at all.
    """
    folder = settings.home / "sites" / site
    status = read_status(folder)
    streams = settings.sites[site]
    if not status and any(isinstance(stream, StreamSettings) for stream in streams):
        return "first run", ""
    if needs_publishing(settings.home, folder):
        return "fleet.duckdb lacks this site", ""
    clusters: dict[Any, Cluster] = {}
    problems, notes = [], []
    try:
        for stream in streams:
            try:
                cluster = clusters.setdefault(stream.source, Cluster(stream.source, f"sr-assets sensor {site}"))
                reason = _work_of(settings, stream, status.get("streams", {}).get(stream.stream), cluster)
            except RunError as error:
                problems.append(f"{stream.label}: {error}")
                continue
            if reason is not None and (pause := _pause_after_error(settings, status, stream)):
                notes.append(pause)
            elif reason is not None:
                return f"{stream.label}: {reason}", ""
    finally:
        for cluster in clusters.values():
            cluster.close()
    if len(problems) == len(streams):
        raise RunError("; ".join(problems))
    return None, "; ".join([*notes, *problems]) or "level"


def _work_of(settings: Settings, stream: Entry, position: dict[str, Any] | None, cluster: Cluster) -> str | None:
    source = cluster.stream_info(stream.stream)
    if position is None or not position["created_ns"]:
        # A feed nobody has told anything yet would only compete with the sites that are about to.
        return None if isinstance(stream, FeedSettings) and not source.last_sequence else "first run"
    if position["created_ns"] != source.created_ns:
        return "the source was made again"
    behind = source.last_sequence + 1 - max(position["next_sequence"], source.first_sequence)
    if position["next_sequence"] > source.last_sequence + 1 and position.get("seen_messages"):
        return "the source ends before the position"
    if behind >= settings.sensor.lag_messages:
        return f"{behind} messages behind"
    if behind > 0 and settings.sensor.lag_ns and _waits_longer(settings, stream, position, source, cluster):
        return f"{behind} messages behind for {settings.sensor.lag_ns // 1_000_000_000} s"
    if (deadline_ns := position["next_deadline_ns"]) is not None and deadline_ns < (
        _watermark(stream, position, source) or 0
    ):
        feed = isinstance(stream, FeedSettings)
        return "a site has been silent for longer than it said" if feed else "a node's deadline has passed"
    if position["unpublished"] and stream.advisory is not None and _deliverable(stream):
        return f"{position['unpublished']} advisories can be delivered"
    return None


def _waits_longer(
    settings: Settings, stream: Entry, position: dict[str, Any], source: StreamInfo, cluster: Cluster
) -> bool:
    unread = cluster.next_message(stream.stream, position["next_sequence"], stream.filter_subject or ">")
    return unread is not None and source.ts_ns is not None and source.ts_ns - unread.stored_ns >= settings.sensor.lag_ns


def _watermark(stream: Entry, position: dict[str, Any], source: StreamInfo) -> int | None:
    """Return what a run that began now would commit."""
    return watermark(
        source.ts_ns,
        None,
        replicas=source.replicas,
        warning_ns=stream.policy.warning_ns if stream.policy else None,
        caught_up=source.last_sequence < position["next_sequence"],
        mirror=source.mirror,
        previous_ns=position["watermark_ns"],
        own_clock_ns=time.time_ns(),
    ).ns


def _deliverable(stream: StreamSettings) -> bool:
    assert stream.advisory is not None
    settings = stream.source if stream.advisory.cluster == "source" else stream.target
    with Cluster(settings, "sr-assets sensor") as cluster:
        return bool(cluster.stream_names(advisory_subject(stream.advisory.subject, "new", "node")))


def _pause_after_error(settings: Settings, status: dict[str, Any], stream: Entry) -> str | None:
    """Return why not to try again yet: after an error as long as it has lasted already, at most five minutes."""
    position = status.get("streams", {}).get(stream.stream)
    if position is None or position["last_error"] is None:
        return None
    lasted = (status["committed_at_ns"] - position["last_error_since_ns"]) / 1e9
    pause = min(max(lasted, settings.sensor.interval_ns / 1e9), _LONGEST_PAUSE_SECONDS)
    waited = status_age_seconds(status)
    if waited is None or waited >= pause:
        return None
    return f"{position['last_error']} (tried again in {pause - waited:.0f} s)"


@dg.op(description="Deletes runs that ended a week ago (failed ones: a month ago), oldest first.")
def delete_old_runs(context: dg.OpExecutionContext) -> None:
    """Delete old runs with their events; no data of ours is in them."""
    deleted = 0
    for statuses, keep in (
        ([dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED], _KEEP_RUNS),
        ([dg.DagsterRunStatus.FAILURE], _KEEP_FAILED_RUNS),
    ):
        filters = dg.RunsFilter(statuses=statuses, created_before=datetime.now(UTC) - keep)
        for record in context.instance.get_run_records(filters=filters, limit=_DELETED_A_NIGHT, ascending=True):
            context.instance.delete_run(record.dagster_run.run_id)
            deleted += 1
    context.log.info("deleted %d runs", deleted)


@dg.job(description="Keeps Dagster's own storage small.", executor_def=dg.in_process_executor)
def retention() -> None:
    """Delete what nobody looks at any more; ticks have their own retention in dagster.yaml."""
    delete_old_runs()


def build_retention_schedule() -> dg.ScheduleDefinition:
    """Return the nightly schedule of the retention job."""
    return dg.ScheduleDefinition(
        name="nightly_retention",
        job=retention,
        cron_schedule="17 3 * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
