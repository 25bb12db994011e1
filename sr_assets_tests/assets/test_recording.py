"""The results of a lingering run in Dagster: recorded when it has caught up, and changes at its end."""

import threading
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.assets.specs import site_job_name
from sr_assets.definitions import build
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until

TRACKED = {"inspect_field": "sender", "inspect_duration": "1h"}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as local:
        yield local


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
    settings = rig.settings(linger="8s")
    job = build(settings).resolve_job_def(site_job_name(SITE))
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

    watching = threading.Thread(target=watch)
    watching.start()
    result = job.execute_in_process(instance=instance, tags={MODE_TAG: LINGER})
    watching.join()
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
