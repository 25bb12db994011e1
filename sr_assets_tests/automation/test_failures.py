"""The sensor of failed runs, in a real Dagster instance with a real receiver of notifications."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.run_failures import read_run_failures
from sr_assets.assets.specs import site_job_name
from sr_assets.automation.failures import build_failure_sensor, record_failures_since
from sr_assets.automation.jobs import JOB_TAG
from sr_assets.definitions import build
from sr_assets.operate.notify import begin_notifying, notify_once
from sr_assets.resources import MODE_TAG, ONCE
from sr_assets.settings import Settings
from sr_assets_tests.exposed import SITES, STREAM, configured
from sr_assets_tests.operate.test_notify import Receiver, receiving

LONDON, PARIS = SITES
#: A tag of all runs of the platform.


class Dagster:
    """A real instance with the platform's definitions; the test evaluates the sensor of failed runs."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self._settings, self._instance = settings, instance
        self._definitions = build(settings)
        self._cursor: str | None = None
        self.evaluate()

    def run(self, site: str) -> str:
        """Execute a site's job, which may fail; return the run's id."""
        job = self._definitions.resolve_job_def(site_job_name(self._settings, site))
        tags = {MODE_TAG: ONCE}
        return job.execute_in_process(instance=self._instance, tags=tags, raise_on_error=False).run_id

    def fail(self, job_name: str, error: BaseException, tags: dict[str, str] | None = None) -> str:
        """Execute a job of this name whose only step raises, by default as one of ours; return the run's id."""

        @dg.op
        def fails() -> None:
            raise error

        @dg.job(name=job_name)
        def failing() -> None:
            fails()

        tags = {JOB_TAG: job_name} if tags is None else tags
        return failing.execute_in_process(instance=self._instance, tags=tags, raise_on_error=False).run_id

    def evaluate(self) -> None:
        """Evaluate the sensor; the first evaluation only sets its cursor."""
        context = dg.build_sensor_context(
            instance=self._instance,
            cursor=self._cursor,
            repository_def=self._definitions.get_repository_def(),
            sensor_name="run_failures",
        )
        self._cursor = build_failure_sensor(self._settings).evaluate_tick(context).cursor


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as local:
        yield local


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A web server that accepts every request."""
    with receiving() as opened:
        yield opened


@pytest.mark.process
def test_failure_of_whole_run_is_sent_once_while_it_lasts(
    tmp_path: Path, instance: dg.DagsterInstance, receiver: Receiver
) -> None:
    settings = configured(tmp_path, *SITES, notify=[{"webhook": receiver.url}])
    begin_notifying(settings)
    dagster = Dagster(settings, instance)
    # A file instead of the state's directory.
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / LONDON).write_text("")
    first = dagster.run(LONDON)
    for _ in range(2):
        dagster.evaluate()
        notify_once(settings)
        dagster.run(LONDON)
    (body,) = receiver.bodies
    assert (body["event"], body["name"], body["stream"]) == ("failed", LONDON, STREAM)
    assert str(tmp_path / "sites" / LONDON) in body["reason"]
    assert f"(run {first})" in body["reason"]
    assert read_run_failures(tmp_path).keys() == {site_job_name(settings, LONDON)}


@pytest.mark.process
def test_failure_in_the_state_is_sent_once(tmp_path: Path, instance: dg.DagsterInstance, receiver: Receiver) -> None:
    settings = configured(tmp_path, LONDON, notify=[{"webhook": receiver.url}])
    begin_notifying(settings)
    dagster = Dagster(settings, instance)
    # No server is running.
    dagster.run(LONDON)
    dagster.evaluate()
    notify_once(settings)
    (body,) = receiver.bodies
    assert (body["event"], body["stream"]) == ("failed", STREAM)
    assert read_run_failures(tmp_path) == {}


@pytest.mark.process
def test_interrupted_run_is_not_a_failure(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    settings = configured(tmp_path, LONDON)
    dagster = Dagster(settings, instance)
    dagster.fail(site_job_name(settings, LONDON), KeyboardInterrupt())
    dagster.evaluate()
    assert read_run_failures(tmp_path) == {}


@pytest.mark.process
def test_failures_of_other_owners_are_not_recorded(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    settings = configured(tmp_path, LONDON)
    dagster, begin = Dagster(settings, instance), datetime.fromtimestamp(0, UTC)
    dagster.fail("nightly", RuntimeError("theirs"), tags={})
    dagster.fail(site_job_name(settings, LONDON), RuntimeError("of a job with our name"), tags={"team": "x"})
    dagster.evaluate()
    record_failures_since(settings, instance, begin)
    assert read_run_failures(tmp_path) == {}
    dagster.fail("nightly", RuntimeError("ours"))
    record_failures_since(settings, instance, begin)
    assert read_run_failures(tmp_path).keys() == {"nightly"}


@pytest.mark.process
def test_failure_of_other_job_is_sent_with_its_name(
    tmp_path: Path, instance: dg.DagsterInstance, receiver: Receiver
) -> None:
    settings = configured(tmp_path, LONDON, notify=[{"webhook": receiver.url}])
    begin_notifying(settings)
    dagster = Dagster(settings, instance)
    dagster.fail("retention", RuntimeError("database is locked"))
    dagster.evaluate()
    notify_once(settings)
    (body,) = receiver.bodies
    assert body["text"].startswith("job retention failed: database is locked")
    assert "stream" not in body
