"""The sensor of failed runs: names the streams and the remedy, and records failures for `notify` that no site's state has.

A failing stream is recorded in its site's state, from which `notify` reports it. Only Dagster knows a failure of the whole run,
such as an unreadable state, a full disk or a killed process.
"""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from sr_assets.adapters.run_failures import RunFailure, note_run_failure, read_run_failures
from sr_assets.adapters.state.status_file import streams_without_error
from sr_assets.assets.specs import entry_path, site_job_name
from sr_assets.automation.jobs import is_own_run
from sr_assets.automation.sensors import sensor_status
from sr_assets.dagster_internals import errors_of, failure_of, logged_events
from sr_assets.resources import NOTED
from sr_assets.settings import Entry, Settings

_KILLED: Final = "no data is lost and the next run continues; if it recurs, check for out-of-memory kills"
#: Errors of a run whose process was terminated, for example by stopping `up`.
_INTERRUPTED: Final = frozenset({"DagsterExecutionInterruptedError", "KeyboardInterrupt"})


def build_failure_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor of the platform's failed runs, including runs of the command line, which have no code location."""

    @dg.run_failure_sensor(
        name=settings.dagster.name("run_failures"),
        monitor_all_code_locations=True,
        default_status=sensor_status(settings),
        description="Names the streams of a failed run and the remedy, and lets `notify` report the failure.",
    )
    def run_failures(context: dg.RunFailureSensorContext) -> None:
        if not is_own_run(settings, context.dagster_run):
            return
        steps = context.get_step_failure_events()
        if line := record_failure(settings, context.instance, context.dagster_run, [*steps, context.failure_event]):
            context.log.error("%s", line)

    return run_failures


def record_failures_since(settings: Settings, instance: dg.DagsterInstance, since: datetime) -> datetime:
    """Record the runs that failed after a time, as the sensor does; return the time of the last one, or `since`."""
    failed = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=since)
    for record in instance.get_run_records(failed, ascending=True):
        run, kinds = record.dagster_run, (dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE)
        if is_own_run(settings, run):
            logged = [event for kind in kinds for event in logged_events(instance, run.run_id, kind)]
            record_failure(settings, instance, run, logged)
        since = max(since, record.update_timestamp.replace(tzinfo=UTC))
    return since


def record_failure(
    settings: Settings, instance: dg.DagsterInstance, run: dg.DagsterRun, events: Sequence[dg.DagsterEvent]
) -> str | None:
    """Record a failed run unless a stream's state has its error; return the line to log, or None after an interrupt.

    `events` are the run's failed steps, then the failure of the run.
    """
    if any(error.kind in _INTERRUPTED for event in events for error in errors_of(event)):
        return None
    steps = [event for event in events if event.is_step_failure]
    site = {site_job_name(settings, site): site for site in settings.sites}.get(run.job_name)
    entries = _entries(settings, site, run.asset_selection)
    reason = "; ".join(failures(steps)) if steps else f"{events[-1].message if events else 'the run failed'}: {_KILLED}"
    where = ", ".join(entry.label for entry in entries) or f"job {run.job_name}"
    streams = streams_without_error(settings.home, entries)
    if not any(_noted(event) for event in steps) and (streams or not entries):
        note_run_failure(settings.home, _failure(settings, instance, run, site, streams, reason))
    return f"{where}: {reason} (run {run.run_id})"


def _entries(settings: Settings, site: str | None, selection: Collection[dg.AssetKey] | None) -> list[Entry]:
    """Return the entries of a site that a run selected; none for a job that is not a site's."""
    selected = [entry_path(key) for key in selection or ()]
    return [entry for entry in settings.sites.get(site or "", ()) if not selected or entry.asset_prefix in selected]


def _failure(
    settings: Settings,
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    site: str | None,
    streams: tuple[str, ...],
    reason: str,
) -> RunFailure:
    """Return the failure of a job; `since_ns` is its first failure since the job last succeeded."""
    record, earlier = instance.get_run_record_by_id(run.run_id), read_run_failures(settings.home).get(run.job_name)
    since_ns = int((record.end_time or 0.0) * 1e9) if record else 0
    if earlier is not None:
        succeeded = dg.RunsFilter(
            job_name=run.job_name,
            statuses=[dg.DagsterRunStatus.SUCCESS],
            updated_after=datetime.fromtimestamp(earlier.since_ns / 1e9, UTC),
        )
        since_ns = since_ns if instance.get_run_records(succeeded, limit=1) else earlier.since_ns
    return RunFailure(run.job_name, run.run_id, site or f"job {run.job_name}", streams, reason, since_ns)


def failures(events: Sequence[dg.DagsterEvent]) -> list[str]:
    """Return why a run failed, as distinct lines: a step's own description, else its innermost error."""
    lines: list[str] = []
    for event in events:
        if (failure := failure_of(event)) is not None and failure.description:
            lines += failure.description.splitlines()
        elif (errors := errors_of(event)) and (event.is_step_failure or not lines):
            text = " ".join(errors[-1].message.split())
            lines.append(text.partition(": ")[2] or text)
    return list(dict.fromkeys(line for line in lines if line.strip())) or [
        "the run failed; its log is in the Dagster UI"
    ]


def _noted(event: dg.DagsterEvent) -> bool:
    """Return whether a step failed because of streams whose states have the error."""
    failure = failure_of(event)
    noted = failure.metadata.get(NOTED) if failure is not None else None
    return noted is not None and bool(noted.value)
