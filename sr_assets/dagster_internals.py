"""Dagster's internals without a public API: payloads of events, jobs, states of runs and daemons, its UI, modules of processes.

`dagster_storage` has those of its storage. No other module uses any; `sr_assets_tests/test_dagster_internals.py` fails if
Dagster changes one. Dagster is imported inside functions: processes that start quickly import this module.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import dagster as dg

#: What `execute_in_process` imports at its first call. Dagster has no command or function that imports it earlier.
IN_PROCESS_RUN: Final = (
    "dagster._core.executor.in_process",
    "dagster._core.instance.factory",
    "dagster._core.storage.local_compute_log_manager",
    "dagster._core.storage.sqlite_storage",
)
#: What a run of the code server imports.
CODE_SERVER_RUN: Final = ("dagster._grpc.impl", *IN_PROCESS_RUN, "dagster._core.workspace.autodiscovery")
#: What the commands of the code server, the daemon and the webserver import.
SERVICES: Final = ("dagster._cli", "dagster._daemon.cli", "dagster_webserver.app")

#: The defaults of `dagster-webserver`: statement timeout in ms, connection recycling in s, pool overflow; poll interval in ms.
_DATABASE: Final = (15_000, 3_600, 20)
_POLL_MS: Final = 2_000


class EventError(NamedTuple):
    """An error that Dagster recorded: the name of its class, and its text, which begins with the class."""

    kind: str
    message: str


def errors_of(event: dg.DagsterEvent) -> list[EventError]:
    """Return an event's error and its causes, innermost last; none if it has no error.

    Read from `event_specific_data.error`, a `SerializableErrorInfo`. The public API has only the text of the event.
    """
    error, chain = getattr(event.event_specific_data, "error", None), list[EventError]()
    while error is not None:
        chain.append(EventError(error.cls_name or "", error.message))
        error = error.cause
    return chain


def failure_of(event: dg.DagsterEvent) -> dg.Failure | None:
    """Return the `Failure` that a step raised, or None.

    Read from `event_specific_data.user_failure_data`, which no public property returns.
    """
    from dagster import Failure

    data = getattr(event.event_specific_data, "user_failure_data", None)
    return None if data is None else Failure(data.description, data.metadata)


def materialization_of(event: dg.DagsterEvent) -> dg.AssetMaterialization | None:
    """Return the materialization that an event records, or None.

    Read from `step_materialization_data`. Only records of the storage have a public property for it.
    """
    return event.step_materialization_data.materialization if event.is_step_materialization else None


def check_evaluations(result: dg.ExecuteInProcessResult) -> Sequence[dg.AssetCheckEvaluation]:
    """Return the check results of a run by `get_asset_check_evaluations`; a public property has only all of its events."""
    return result.get_asset_check_evaluations()


def logged_events(
    instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType | None = None
) -> list[dg.DagsterEvent]:
    """Return the logged events of a run, of one type or all, by `all_logs`.

    The public methods read events of assets, and a sensor's context those of its own run.
    """
    logged = instance.all_logs(run_id, of_type=of_type)
    return [entry.dagster_event for entry in logged if entry.dagster_event is not None]


def report_failed(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str) -> None:
    """Set a run's status to failed by `report_run_failed`; no public method sets a status."""
    instance.report_run_failed(run, message)


def report_canceled(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Set a run's status to canceled by `report_run_canceled`; no public method sets a status."""
    instance.report_run_canceled(run)


def is_launched_here(instance: dg.DagsterInstance) -> bool:
    """Return whether an instance's runs are processes of this host, by `run_launcher`; no public property returns it."""
    from dagster import DefaultRunLauncher

    return isinstance(instance.run_launcher, DefaultRunLauncher)


def concurrent_runs(instance: dg.DagsterInstance) -> int:
    """Return how many runs an instance allows at a time, negative for any number, by `get_concurrency_config`.

    The public API has only the limits of pools.
    """
    run_queue = instance.get_concurrency_config().run_queue_config
    return run_queue.max_concurrent_runs if run_queue else -1


def tag_run(instance: dg.DagsterInstance, run_id: str, tags: Mapping[str, str]) -> None:
    """Add tags to a run that has begun, by `add_run_tags`; no public method does."""
    instance.add_run_tags(run_id, dict(tags))


def daemon_heartbeats(instance: dg.DagsterInstance) -> dict[str, float]:
    """Return the last heartbeat of each required daemon, in unix seconds or 0, by `get_daemon_statuses`.

    The public command `dagster-daemon liveness-check` has only one result for all daemons.
    """
    return {
        name: status.last_heartbeat.timestamp if status.last_heartbeat else 0.0
        for name, status in instance.get_daemon_statuses().items()
        if status.required
    }


def job_of(definitions: dg.Definitions, name: str) -> dg.JobDefinition:
    """Return a job by `resolve_job_def`; the public `get_job_def` warns about jobs that are to be resolved."""
    return definitions.resolve_job_def(name)


def repository_of(definitions: dg.Definitions) -> dg.RepositoryDefinition:
    """Return the resolved definitions by `get_repository_def`; a public decorator makes a repository only of its parts."""
    return definitions.get_repository_def()


def requested_runs(
    schedule: dg.ScheduleDefinition, instance: dg.DagsterInstance, scheduled_at: datetime
) -> Sequence[dg.RunRequest]:
    """Return the runs that a schedule requests at a time, by `evaluate_tick`.

    The public call of a schedule fails for one without a function, and adds no tags.
    """
    import dagster as dg

    context = dg.build_schedule_context(instance=instance, scheduled_execution_time=scheduled_at)
    return schedule.evaluate_tick(context).run_requests or ()


def component_key(context: dg.ComponentLoadContext) -> str:
    """Return what identifies a component in its project, as Dagster shows it, by `get_display_key`.

    The public path of a component is also that of others in the same file.
    """
    return context.component_loc.get_display_key(context.defs_module_path)


@contextlib.contextmanager
def dagster_ui(workspace: Path, *, read_only: bool) -> Iterator[Any]:
    """Yield Dagster's UI for a workspace file as an ASGI application.

    This repeats the start of the public command `dagster-webserver`, which accepts no middleware.
    """
    from dagster import DagsterInstance
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context
    from dagster_webserver.version import __version__

    with DagsterInstance.get() as instance:
        instance.optimize_for_webserver(*_DATABASE)
        target = WorkspaceFileTarget([str(workspace)])
        with WorkspaceProcessContext(instance, target, version=__version__, read_only=read_only) as context:
            yield create_app_from_workspace_process_context(context, "", _POLL_MS)


def import_in_process_run() -> None:
    """Import `IN_PROCESS_RUN`."""
    for name in IN_PROCESS_RUN:
        importlib.import_module(name)
