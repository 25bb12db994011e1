"""Assets of users that follow the platform's by Dagster's automation conditions, over small updates of a fleet."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters import times
from sr_assets.adapters.times import utc_now
from sr_assets.assets.freshness import TABLE_REPEATED
from sr_assets.assets.specs import DATA_VERSION_TAG, site_job_name, stream_key, table_key
from sr_assets.definitions import build
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets.settings import Settings
from sr_assets_tests.rig import SITE, Rig, Sent, in_background, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Parameter `include_sources`")  # by Dagster's own evaluation
CONDITION = dg.AutomationCondition
#: The condition of docs/dagster.md.
ON_EACH_CHANGE = (
    CONDITION.any_deps_match(CONDITION.newly_updated()).since(CONDITION.newly_requested())
    & ~CONDITION.any_deps_missing()
    & ~CONDITION.any_deps_in_progress()
    & ~CONDITION.in_progress()
)
TRACKED = {"inspect_field": "sender", "inspect_duration": "1h"}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as local:
        yield local


class Downstream:
    """A deployment with assets of a user next to the platform, and the daemon's evaluation of their conditions."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self._settings, self._instance = settings, instance
        self.definitions = build(settings)
        (stream,) = settings.streams
        followed = {
            "per_nodes": table_key(settings, "last_seen_nodes"),
            "per_gap": table_key(settings, "gaps"),
            "per_replica": stream_key(settings, stream, "replica"),
        }
        eager = [
            dg.AssetSpec(name, deps=[key], automation_condition=CONDITION.eager()) for name, key in followed.items()
        ]
        exact = dg.AssetSpec(
            "exact",
            deps=[table_key(settings, "last_seen_nodes")],
            automation_condition=ON_EACH_CHANGE,
        )
        hourly = dg.AssetSpec(
            "hourly",
            deps=[table_key(settings, table) for table in ("last_seen_nodes", "retired_nodes", "gaps")],
            automation_condition=CONDITION.on_cron("0 * * * *"),
        )

        @dg.multi_asset(specs=[*eager, exact, hourly], can_subset=True)
        def theirs(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
            for key in context.selected_asset_keys:
                yield dg.MaterializeResult(key)

        self._whole = dg.Definitions.merge(self.definitions, dg.Definitions(assets=[theirs]))
        self._cursor: dg.AssetDaemonCursor | None = None

    def run(self, *, lingers: bool = True) -> None:
        """Execute a run of the site, as its sensor requests it."""
        job = self.definitions.resolve_job_def(site_job_name(self._settings, SITE))
        tags = {MODE_TAG: LINGER} if lingers else {}
        assert job.execute_in_process(instance=self._instance, tags=tags).success

    def tick(self, at: datetime | None = None) -> set[str]:
        """Evaluate the conditions, execute what they request, and return the names of these assets."""
        result = dg.evaluate_automation_conditions(
            self._whole, self._instance, cursor=self._cursor, evaluation_time=at or utc_now()
        )
        self._cursor = result.cursor
        requested = [subset.key for subset in result._requested_subsets if isinstance(subset.key, dg.AssetKey)]
        if requested:
            job = self._whole.resolve_implicit_global_asset_job_def()
            assert job.execute_in_process(instance=self._instance, asset_selection=requested).success
        return {key.to_user_string() for key in requested}


def a_change(rig: Rig, stream: str, node: str) -> None:
    rig.publish(stream, [Sent(b'{"sender": "%s"}' % node.encode())])


@pytest.fixture
def stream(rig: Rig) -> str:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", **TRACKED)
    a_change(rig, stream, "web0")
    return stream


@pytest.mark.nightly
def test_eager_asset_starts_once_per_change(rig: Rig, instance: dg.DagsterInstance, stream: str) -> None:
    downstream = Downstream(rig.settings(linger="1s"), instance)
    downstream.run()
    # Of the first evaluation, Dagster only notes the time.
    assert downstream.tick() == set()
    for number in range(3):
        a_change(rig, stream, f"db{number}")
        downstream.run()
        # No message is missing in the source, so the table of gaps has not changed.
        assert [downstream.tick(), downstream.tick()] == [{"per_nodes", "per_replica", "exact"}, set()]
    rig.api(f"STREAM.PURGE.{stream}", {"seq": rig.info(stream).last_sequence + 1})
    a_change(rig, stream, "db0")
    rig.api(f"STREAM.PURGE.{stream}", {"seq": rig.info(stream).last_sequence + 1})
    downstream.run()
    # The message is gone before it was read.
    assert [downstream.tick(), downstream.tick()] == [{"per_gap", "per_replica"}, set()]


def test_exact_condition_loses_no_change_during_a_lingering_run(
    rig: Rig, instance: dg.DagsterInstance, stream: str
) -> None:
    settings = rig.settings(linger="10s")
    downstream, key = Downstream(settings, instance), stream_key(settings, settings.streams[0], "replica")
    downstream.tick()

    def change() -> None:
        wait_until(lambda: instance.get_latest_materialization_event(key) is not None, "the first record of the run")
        assert downstream.tick() == {"per_nodes", "per_replica", "per_gap", "exact"}
        a_change(rig, stream, "db0")

    with in_background(change):
        downstream.run()
    # For `eager()`, the run that it started before this change has handled it.
    assert [downstream.tick(), downstream.tick()] == [{"exact"}, set()]


def test_table_of_the_last_minute_waits_for_the_end_of_a_lingering_run(
    rig: Rig, instance: dg.DagsterInstance, stream: str
) -> None:
    settings = rig.settings(linger="1s")
    downstream, table = Downstream(settings, instance), table_key(settings, "last_seen_nodes")
    replica = stream_key(settings, settings.streams[0], "replica")
    downstream.run(lingers=False)
    a_change(rig, stream, "db0")

    downstream.run()

    def recorded_at(key: dg.AssetKey) -> list[float]:
        return [event.timestamp for event in instance.fetch_materializations(key, limit=10).records]

    # A run records the tables first, so the second event of this one is of the end of the run.
    (second, _), (second_of_replica, _) = recorded_at(table), recorded_at(replica)
    assert second_of_replica < second


@pytest.mark.nightly
def test_on_cron_asset_starts_once_an_hour(rig: Rig, instance: dg.DagsterInstance, stream: str) -> None:
    downstream = Downstream(rig.settings(linger="1s"), instance)
    hour = utc_now().replace(minute=0, second=0, microsecond=0)
    downstream.tick(hour - timedelta(minutes=1))
    downstream.run()
    assert "hourly" in downstream.tick()
    a_change(rig, stream, "db0")
    downstream.run()
    assert "hourly" not in downstream.tick()


def test_table_is_recorded_again_after_an_hour_without_a_change(
    rig: Rig, instance: dg.DagsterInstance, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rig.settings()
    downstream, key = Downstream(settings, instance), table_key(settings, "gaps")

    def records() -> list[tuple[str | None, float]]:
        events = instance.fetch_materializations(key, limit=10).records
        versions = [(event.asset_materialization.tags or {}) for event in events if event.asset_materialization]
        return [(tags[DATA_VERSION_TAG], event.timestamp) for tags, event in zip(versions, events, strict=True)]

    downstream.run(lingers=False)
    (first,) = records()
    a_change(rig, stream, "db0")
    downstream.run(lingers=False)
    assert records() == [first]
    later = utc_now() + TABLE_REPEATED
    monkeypatch.setattr(times, "time", later.timestamp)
    downstream.run(lingers=False)
    (version, _), before = records()
    assert (before, version) == (first, first[0])
