"""The results of a site's run in Dagster: of a lingering run, and of a run with a failing stream."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.assets.fleet import published_tables
from sr_assets.assets.specs import site_job_name, stream_key
from sr_assets.definitions import build
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets_tests.rig import SITE, Rig, Sent, in_background, wait_until

TRACKED = {"inspect_field": "sender", "inspect_duration": "1h"}
NOUNS = ("node_state", "replica", "node_snapshots", "node_advisories")


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as local:
        yield local


def refuse_copies(rig: Rig, stream: str, _: pytest.MonkeyPatch) -> None:
    rig.create(stream, rig.target, no_ack=True)


def raise_unexpected_error(rig: Rig, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CopyBatch.run

    def fail(batch: CopyBatch, *arguments: Any) -> None:
        if batch._stream.stream == stream:
            raise LookupError("no such column\ndetails")
        run(batch, *arguments)

    monkeypatch.setattr(CopyBatch, "run", fail)


@pytest.mark.parametrize(
    ("sabotage", "reason"), ((refuse_copies, "no_ack"), (raise_unexpected_error, "LookupError: no such column"))
)
def test_failing_stream_fails_only_its_own_assets(
    rig: Rig,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Rig, str, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    bad, good = rig.make("BAD"), rig.make("GOOD")
    for stream in (bad, good):
        rig.add(stream, **TRACKED)
        rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    sabotage(rig, bad, monkeypatch)
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    (failure,) = result.get_step_failure_events()
    assert failure.step_failure_data.user_failure_data is not None
    (line,) = str(failure.step_failure_data.user_failure_data.description).splitlines()
    assert line.startswith(f"{SITE}/{bad}: ")
    assert reason in line
    keys = {stream_key(settings, entry, noun): entry.stream for entry in settings.streams for noun in NOUNS}
    records = {record.asset_entry.asset_key: record.asset_entry for record in instance.get_asset_records([*keys])}
    # Dagster shows an asset as failed if its last run failed and did not materialise it.
    failed = {key for key in keys if records[key].last_materialization is None}
    assert all(records[key].last_run_id == result.run_id for key in keys)
    assert failed == {stream_key(settings, settings.find(bad)[0], noun) for noun in ("replica", "node_snapshots")}
    checked = {check.asset_key for check in result.get_asset_check_evaluations() if check.passed}
    assert stream_key(settings, settings.find(good)[0], "replica") in checked


def materialised(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[dg.AssetMaterialization]:
    """Return the materialisations of an asset, newest first."""
    records = instance.fetch_materializations(key, limit=10).records
    return [record.asset_materialization for record in records if record.asset_materialization]


def is_evaluated(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> bool:
    """Return whether the newest execution of a check has a result, as the UI shows it."""
    latest = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    return latest is not None and latest.evaluation is not None


def test_lingering_run_records_assets_and_checks_before_it_ends(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", **TRACKED)
    rig.publish(stream, [Sent(b'{"sender": "web1"}'), Sent(b'{"sender": "web2"}')])
    settings = rig.settings(linger="20s")
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    prefix, seen = settings.streams[0].asset_prefix, []
    assets = [dg.AssetKey([*prefix, noun]) for noun in ("node_state", "replica", "node_snapshots", "node_advisories")]
    tables = [dg.AssetKey(["fleet", table]) for table in ("last_seen_nodes", "replication")]
    check = dg.AssetCheckKey(assets[1], "no_loss")

    def watch() -> None:
        wait_until(
            lambda: all(materialised(instance, key) for key in (*assets, *tables)) and is_evaluated(instance, check),
            "the first results",
        )
        seen.append(lock_owner(settings.home / "sites" / SITE))
        # A message without a sender changes a check result while the run lingers.
        rig.publish(stream, [Sent(b"nobody")])

    with in_background(watch):
        result = job.execute_in_process(instance=instance, tags={MODE_TAG: LINGER})
    assert result.success
    assert seen[0] is not None, "the run ended before its results were recorded"
    replica = materialised(instance, assets[1])
    assert [event.metadata["messages"].value for event in replica] == [3, 2]
    for key, rows in zip((*assets, *tables), (2, 3, 2, 2, 2, 1), strict=True):
        metadata = materialised(instance, key)[0].metadata
        assert metadata["dagster/row_count"].value == rows, key
        if key in assets:
            schema = metadata["dagster/column_schema"]
            assert isinstance(schema, dg.TableSchemaMetadataValue)
            assert all(column.description for column in schema.schema.columns), key
    senders = dg.AssetCheckKey(assets[1], "senders_found")
    executions = instance.event_log_storage.get_asset_check_execution_history(senders, limit=10)
    assert [execution.evaluation.passed for execution in executions if execution.evaluation] == [False]


def test_table_with_a_damaged_file_hides_no_other(
    rig: Rig, instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", **TRACKED)
    rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    rig.drain()
    settings = rig.settings()
    whole = {event.asset_key for event in published_tables(settings, instance)}
    contents = {file: file.read_bytes() for file in (rig.home / "snapshots").rglob("*.parquet")}
    for file in contents:
        file.write_bytes(b"")
    readable = {event.asset_key for event in published_tables(settings, instance)}
    # Other tests read this home too.
    for file, content in contents.items():
        file.write_bytes(content)
    assert whole - readable == {dg.AssetKey(["fleet", "node_snapshots"])}
    assert "the table node_snapshots cannot be read: " in caplog.text
