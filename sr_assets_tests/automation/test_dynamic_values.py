"""Dynamic values: a run reads them once and records them, and sensors read `paused` and the interval themselves."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from sr_assets.adapters.data import Source
from sr_assets.assets.specs import site_job_name
from sr_assets.definitions import build
from sr_assets.resources import DATA_TAG
from sr_assets.settings import Settings
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until
from sr_assets_tests.sourced import kv


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


@pytest.fixture
def stream(rig: Rig, data_bucket: str) -> str:
    stream = rig.make()
    paused = {"data": "ops/paused", "default": False, "dynamic": True}
    rig.add(stream, target_stream=rig.unique("T"), target_subject_prefix="c", paused=paused)
    return stream


def configured(rig: Rig, data_bucket: str, **top: Any) -> Settings:
    return rig.settings(data={"ops": kv(rig, data_bucket)}, **top)


def run(settings: Settings, instance: dg.DagsterInstance) -> list[dg.AssetMaterialization]:
    """Run the site's job as Dagster does; return the materialisations of its replica."""
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    result = job.execute_in_process(instance=instance)
    events = [event.step_materialization_data.materialization for event in result.get_asset_materialization_events()]
    return [event for event in events if event.asset_key.path[-1] == "replica"]


def test_run_records_its_dynamic_values(rig: Rig, ops: Source, data_bucket: str, stream: str, instance: Any) -> None:
    settings = configured(rig, data_bucket)
    ops.put("paused", "true")
    rig.publish(stream, [Sent()])
    (first,) = run(settings, instance)
    assert first.metadata["data"].value == {"ops/paused": "true"}
    assert rig.row("SELECT paused FROM replication")["paused"]
    (record,) = instance.get_runs()
    assert record.tags[DATA_TAG] == '{"ops/paused": "true"}'
    ops.put("paused", "false")
    (second,) = run(settings, instance)
    assert second.metadata["data"].value == {"ops/paused": "false"}
    assert (rig.row("replication")["paused"], rig.row("replication")["copied_messages"]) == (False, 1)
    assert rig.rows("SELECT action, subject, detail FROM operator_actions") == [
        {"action": "data change", "subject": "ops/paused", "detail": "true -> false"}
    ]


def test_run_keeps_the_value_of_its_start(rig: Rig, ops: Source, data_bucket: str, stream: str) -> None:
    ops.put("paused", "false")
    rig.publish(stream, [Sent()])
    with rig.open(data={"ops": kv(rig, data_bucket)}) as site:
        ops.put("paused", "true")
        (report,) = run_site(site, {stream: frozenset(Stage)}, drain_only=True).values()
    assert (report.paused, report.copied) == (False, 1)
    (report,) = rig.run(data={"ops": kv(rig, data_bucket)}).values()
    assert report.paused


def test_sensor_reads_paused_and_interval(rig: Rig, ops: Source, data_bucket: str, stream: str, instance: Any) -> None:
    cadence = {"data": "ops/cadence", "default": "1s", "dynamic": True}
    rig.publish(stream, [Sent()])
    definitions = build(configured(rig, data_bucket, sensor={"interval": cadence}))
    sensor = definitions.resolve_sensor_def(f"{SITE}_lag")
    assert sensor.minimum_interval_seconds == 1

    def tick() -> dg.SensorResult:
        with dg.build_sensor_context(instance=instance, definitions=definitions) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    assert tick().run_requests
    ops.put("cadence", "1h")
    assert "next poll in 3" in str(tick().skip_reason)
    ops.put("cadence", "1s")
    rig.drain(data={"ops": kv(rig, data_bucket)})
    rig.publish(stream, [Sent()])
    ops.put("paused", "true")
    ticks: list[dg.SensorResult] = []

    def polled() -> bool:
        ticks.append(tick())
        return "next poll" not in str(ticks[-1].skip_reason)

    wait_until(polled, "the next poll")
    # The run shows the pause in the tables.
    (request,) = ticks[-1].run_requests or ()
    assert request.tags["sr_assets/reason"].endswith("copying was paused")
    rig.drain(data={"ops": kv(rig, data_bucket)})
    assert rig.row("replication")["paused"]
    wait_until(polled, "another poll")
    assert "paused" in str(ticks[-1].skip_reason)


def test_bad_value_does_not_stop_a_run(
    rig: Rig, ops: Source, data_bucket: str, stream: str, instance: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = configured(rig, data_bucket)
    run(settings, instance)
    ops.put("paused", "perhaps")
    rig.publish(stream, [Sent()])
    (event,) = run(settings, instance)
    # The default was the previous value.
    assert event.metadata["data"].value == {"ops/paused": "false"}
    assert rig.row("replication")["copied_messages"] == 1
    assert any("paused: data ops/paused: 'perhaps' is neither true nor false" in line for line in caplog.messages)
