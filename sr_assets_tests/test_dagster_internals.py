"""Dagster's internals that this package uses: each still exists and works, and no other module uses one.

If a test fails after an update of Dagster, change the function in `dagster_internals` or `dagster_storage` that uses the
internal, and its test.
"""

import ast
import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pytest
from dagster._annotations import is_public
from dagster._core.events import JobFailureData
from dagster._core.execution.plan.objects import StepFailureData, UserFailureData
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable
from dagster._daemon.types import DaemonHeartbeat, DaemonStatus
from dagster._grpc.server import DagsterApiServer
from dagster.components.core.defs_module import ComponentLoc
from dagster_shared.error import SerializableErrorInfo

from sr_assets import dagster_internals, dagster_storage
from sr_assets.dagster_internals import CODE_SERVER_RUN, IN_PROCESS_RUN, SERVICES
from sr_assets_tests.test_architecture import MODULES, imports

#: The modules that use internals.
HOMES: Final = {"dagster_internals", "dagster_storage"}
#: Attributes that those modules use, by class.
INTERNALS: Final[dict[type, tuple[str, ...]]] = {
    dg.AssetKey: ("to_string",),
    dg.DagsterEvent: ("event_specific_data", "event_type_value", "step_materialization_data"),
    dg.DagsterInstance: (
        "all_asset_keys",
        "all_instigator_state",
        "all_logs",
        "compute_log_manager",
        "event_log_storage",
        "add_run_tags",
        "get_concurrency_config",
        "get_daemon_statuses",
        "get_run_ids",
        "get_run_tags",
        "get_runs_count",
        "optimize_for_webserver",
        "report_run_canceled",
        "report_run_failed",
        "run_launcher",
        "storage_directory",
    ),
    dg.Definitions: ("get_repository_def", "resolve_job_def"),
    dg.ExecuteInProcessResult: ("get_asset_check_evaluations",),
    dg.ScheduleDefinition: ("evaluate_tick",),
    ComponentLoc: ("get_display_key",),
    DaemonStatus: ("last_heartbeat", "required"),
    JobFailureData: ("error",),
    SerializableErrorInfo: ("cause", "cls_name", "message"),
    SqliteEventLogStorage: ("index_connection", "path_for_shard", "run_connection"),
    StepFailureData: ("error", "user_failure_data"),
    UserFailureData: ("description", "metadata"),
}
#: Columns that `dagster_storage` uses, by table.
COLUMNS: Final = {
    SqlEventLogStorageTable: {"asset_key", "dagster_event_type", "event", "id", "partition", "run_id", "timestamp"},
    AssetCheckExecutionsTable: {"asset_key", "check_name", "create_timestamp", "id", "run_id"},
}
#: Names of internals that are names of other things too.
AMBIGUOUS: Final = {"cause", "description", "error", "message", "metadata", "required"}
#: Further internals, which no module may use.
FORBIDDEN: Final = {
    "asset_check_evaluation_data",
    "asset_layer",
    "job_failure_data",
    "run_storage",
    "schedule_storage",
    "step_failure_data",
    "user_failure_data",
}
#: Packages of Dagster whose top level is public.
PUBLIC_PACKAGES: Final = {"dagster", "dagster_duckdb", "dagster_pyspark"}

needs_process = pytest.mark.process
NUMBERS: Final = dg.AssetKey(["london", "numbers"])


@dg.multi_asset(
    specs=[dg.AssetSpec(NUMBERS)], check_specs=[dg.AssetCheckSpec("positive", asset=NUMBERS)], name="numbers"
)
def numbers() -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
    yield dg.MaterializeResult[None](NUMBERS, metadata={"rows": 3})
    yield dg.AssetCheckResult(asset_key=NUMBERS, check_name="positive", passed=False, description="none")


@dg.op
def raising() -> None:
    try:
        raise ValueError("no rows")
    except ValueError as error:
        raise RuntimeError("unusable") from error


@dg.op
def giving_up() -> None:
    raise dg.Failure("london/A: gone", metadata={"noted": True})


@dg.job(executor_def=dg.in_process_executor)
def failing() -> None:
    raising()
    giving_up()


@dg.schedule(cron_schedule="7 * * * *", job=failing)
def with_function() -> dg.RunRequest:
    return dg.RunRequest(tags={"day": "monday"})


DEFINITIONS: Final = dg.Definitions(
    assets=[numbers],
    jobs=[dg.define_asset_job("numbers_job", [numbers]), failing],
    schedules=[with_function, dg.ScheduleDefinition(name="plain", job=failing, cron_schedule="17 3 * * *")],
)


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """A new instance with SQLite storage in `DAGSTER_HOME`."""
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as opened:
        yield opened


def run(name: str, instance: dg.DagsterInstance, **tags: str) -> dg.ExecuteInProcessResult:
    job = dagster_internals.job_of(DEFINITIONS, name)
    return job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)


@pytest.mark.parametrize(
    ("owner", "name"),
    [pytest.param(owner, name, id=f"{owner.__name__}.{name}") for owner, names in INTERNALS.items() for name in names],
)
def test_internal_exists(owner: type, name: str) -> None:
    declared = {each for base in owner.__mro__ for each in (*vars(base), *inspect.get_annotations(base))}
    assert name in declared, f"Dagster's {owner.__name__} has no {name}: adapt its use in {' or '.join(sorted(HOMES))}"


@pytest.mark.parametrize("name", sorted({*CODE_SERVER_RUN, *IN_PROCESS_RUN, *SERVICES}))
def test_module_to_import_early_exists(name: str) -> None:
    assert importlib.import_module(name)


def test_tables_have_the_columns() -> None:
    missing = {table.name: columns - {*table.c.keys()} for table, columns in COLUMNS.items()}
    assert missing == {"event_logs": set(), "asset_check_executions": set()}, "adapt dagster_storage"


def test_code_server_spawns_runs() -> None:
    """`run_processes` replaces the processes of this context."""
    source = inspect.getsource(DagsterApiServer)
    assert 'multiprocessing.get_context("spawn")' in source, "adapt automation.run_processes"
    assert "_mp_ctx.Process(" in source, "adapt automation.run_processes"


@needs_process
def test_errors_of_an_event_end_with_the_innermost(instance: dg.DagsterInstance) -> None:
    result = run("failing", instance)
    failed = {event.step_key: event for event in result.all_events if event.is_step_failure}
    errors = dagster_internals.errors_of(failed["raising"])
    assert [error.kind for error in errors[-2:]] == ["RuntimeError", "ValueError"]
    assert errors[-1].message.strip() == "ValueError: no rows"
    started = next(event for event in result.all_events if event.event_type is dg.DagsterEventType.STEP_START)
    assert dagster_internals.errors_of(started) == []


@needs_process
def test_failure_of_an_event_is_the_one_raised(instance: dg.DagsterInstance) -> None:
    failed = {event.step_key: event for event in run("failing", instance).all_events if event.is_step_failure}
    failure = dagster_internals.failure_of(failed["giving_up"])
    assert failure is not None
    assert (failure.description, failure.metadata["noted"].value) == ("london/A: gone", True)
    assert dagster_internals.failure_of(failed["raising"]) is None


@needs_process
def test_results_of_a_run_have_materializations_and_checks(instance: dg.DagsterInstance) -> None:
    result = run("numbers_job", instance)
    made = [made for event in result.all_events if (made := dagster_internals.materialization_of(event)) is not None]
    assert [(each.asset_key, each.metadata["rows"].value) for each in made] == [(NUMBERS, 3)]
    (check,) = dagster_internals.check_evaluations(result)
    assert (check.asset_key, check.check_name, check.passed, check.description) == (NUMBERS, "positive", False, "none")


@needs_process
def test_logged_events_are_of_one_type_or_all(instance: dg.DagsterInstance) -> None:
    result = run("failing", instance)
    failures = dagster_internals.logged_events(instance, result.run_id, dg.DagsterEventType.STEP_FAILURE)
    assert {event.step_key for event in failures} == {"raising", "giving_up"}
    whole = dagster_internals.logged_events(instance, result.run_id)
    assert {event.event_type for event in whole} > {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}


def test_statuses_of_runs_can_be_set(instance: dg.DagsterInstance) -> None:
    failed, canceled = (instance.create_run_for_job(failing, status=dg.DagsterRunStatus.STARTED) for _ in range(2))
    dagster_internals.report_failed(instance, failed, "the process has ended")
    dagster_internals.report_canceled(instance, canceled)
    statuses = [instance.get_run_by_id(each.run_id) for each in (failed, canceled)]
    assert [each.status for each in statuses if each] == [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


def test_tags_are_added_to_a_run(instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(failing, tags={"site": "london"})
    dagster_internals.tag_run(instance, run.run_id, {"day": "monday"})
    tagged = instance.get_run_by_id(run.run_id)
    assert tagged is not None
    assert {"site": "london", "day": "monday"}.items() <= tagged.tags.items()


def test_place_and_number_of_runs_are_those_of_the_instance(instance: dg.DagsterInstance) -> None:
    assert dagster_internals.is_launched_here(instance)
    file = Path(instance.root_directory) / "dagster.yaml"
    file.write_text("concurrency: {runs: {max_concurrent_runs: 3}}\n")
    with dg.DagsterInstance.get() as limited:
        assert dagster_internals.concurrent_runs(limited) == 3
    with dg.DagsterInstance.ephemeral() as elsewhere:
        assert not dagster_internals.is_launched_here(elsewhere)


def test_daemon_heartbeats_are_those_of_required_daemons(instance: dg.DagsterInstance) -> None:
    before = dagster_internals.daemon_heartbeats(instance)
    assert {"SCHEDULER", "SENSOR"} <= before.keys()
    assert set(before.values()) == {0.0}
    instance.add_daemon_heartbeat(DaemonHeartbeat(1_800_000_000.0, "SENSOR", None, None))
    assert dagster_internals.daemon_heartbeats(instance) == before | {"SENSOR": 1_800_000_000.0}


def test_schedules_with_and_without_a_function_request_runs(instance: dg.DagsterInstance) -> None:
    at, requested = datetime(2026, 1, 2, 3, 17, tzinfo=UTC), {}
    repository = dagster_internals.repository_of(DEFINITIONS)
    assert repository.has_job("numbers_job")
    for schedule in repository.schedule_defs:
        (request,) = dagster_internals.requested_runs(schedule, instance, at)
        requested[schedule.name] = request.tags
    assert requested["with_function"]["day"] == "monday"
    assert [tags["dagster/schedule_name"] for tags in requested.values()] == [*requested]


def test_component_key_is_its_path_in_the_project() -> None:
    context = dg.ComponentTree.for_test().load_context
    assert isinstance(dagster_internals.component_key(context), str)


def answer(application: Any, method: str, path: str, body: bytes = b"") -> Any:
    """Return the JSON with which an ASGI application answers a request."""
    parts: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    asyncio.run(application(scope, receive, send))
    return json.loads(b"".join(parts))


@pytest.mark.parametrize("read_only", (False, True))
def test_ui_answers_for_a_workspace(instance: dg.DagsterInstance, tmp_path: Path, *, read_only: bool) -> None:
    workspace = tmp_path / "workspace.yaml"
    workspace.write_text("load_from: []\n")
    query = json.dumps({"query": "{ permissions { permission value } }"}).encode()
    with dagster_internals.dagster_ui(workspace, read_only=read_only) as application:
        assert answer(application, "GET", "/server_info")["dagster_version"] == dg.__version__
        permissions = answer(application, "POST", "/graphql", query)["data"]["permissions"]
    assert {each["permission"]: each["value"] for each in permissions}["launch_pipeline_execution"] is not read_only


def test_storage_is_created_in_its_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert not dagster_storage.is_created(tmp_path)
    assert not dagster_storage.has_history(tmp_path)
    dagster_storage.create_storage(request.getfixturevalue("instance"))
    assert dagster_storage.is_created(tmp_path)
    assert dagster_storage.has_history(tmp_path)
    assert {"index.db", "runs.db", "schedules.db"} <= {path.name for path in tmp_path.rglob("*.db")}


@needs_process
def test_storage_deletes_everything_of_a_run(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    older, newer = (run("numbers_job", instance, site=site).run_id for site in ("paris", "london"))
    assert [*dagster_storage.run_ids(instance, dg.RunsFilter(job_name="numbers_job"))] == [newer, older]
    assert dagster_storage.existing_runs(instance, [older, "another"]) == {older}
    assert dagster_storage.tag_values(instance, ["site"]) == {"site": ["london", "paris"]}
    assert dagster_storage.newest_materializations(instance) == {newer}
    assert dagster_storage.checked_runs(instance, [NUMBERS]) == sorted([older, newer])
    assert any(older in path.name for path in tmp_path.rglob("*"))
    instance.delete_run(older)
    dagster_storage.delete_files(instance, older)
    dagster_storage.delete_checks(instance, [older])
    assert not any(older in path.name for path in tmp_path.rglob("*"))
    assert dagster_storage.checked_runs(instance, [NUMBERS]) == [newer]


def test_storage_deletes_old_events_without_a_run(instance: dg.DagsterInstance) -> None:
    for number in range(3):
        instance.report_runless_asset_event(dg.AssetObservation(NUMBERS, metadata={"number": number}))
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(asset_key=NUMBERS, check_name="positive", passed=True)
        )
    now = datetime.now(UTC)
    before, after = now - timedelta(days=1), now + timedelta(days=1)
    assert dagster_storage.delete_runless(instance, [NUMBERS], before, before) == 0
    # Two observations; then two check results, each an event and a row of its table.
    assert dagster_storage.delete_runless(instance, [NUMBERS], before, after) == 2
    assert dagster_storage.delete_runless(instance, [NUMBERS], after, after) == 4
    assert len(instance.fetch_observations(NUMBERS, limit=10).records) == 1


def used(module: str) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a module reads, directly or by `getattr`, each with its owner's text."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name, *_ = node.args
            if isinstance(name, ast.Constant):
                yield ast.unparse(owner), str(name.value)


def test_no_other_module_imports_internals_of_dagster() -> None:
    wrong = {
        (module, name)
        for module in MODULES.keys() - HOMES
        for name in imports(module)
        if name.startswith("dagster")
        and not any(re.fullmatch(rf"{public}(\.[A-Za-z]\w*)?", name) for public in PUBLIC_PACKAGES)
    }
    assert wrong == set(), "use a public name, or add a function to dagster_internals"


def test_no_other_module_names_modules_of_dagster_in_a_text() -> None:
    wrong = {
        (module, node.value)
        for module in MODULES.keys() - HOMES
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"dagster\._[\w.]+|dagster_\w+\.[\w.]+", node.value)
    }
    assert wrong == set(), "add it to the modules in dagster_internals"


def test_no_other_module_uses_internals_of_dagster() -> None:
    internal = {name for names in INTERNALS.values() for name in names} - AMBIGUOUS | FORBIDDEN
    wrong = {
        (module, f"{owner}.{name}")
        for module in MODULES.keys() - HOMES
        if any(name.startswith(("dagster", "sr_assets.dagster_")) for name in imports(module))
        for owner, name in used(module)
        if (name in internal or (re.search(r"\b_?instance$", owner) and not is_public_of_instance(name)))
    }
    assert wrong == set(), "use a public method, or add a function to dagster_internals"


def is_public_of_instance(name: str) -> bool:
    """Return whether a method of the instance, or of a class from which it inherits, is documented."""
    methods: list[Any] = [vars(base)[name] for base in dg.DagsterInstance.__mro__ if name in vars(base)]
    return any(is_public(method) for method in methods)
