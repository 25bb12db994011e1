"""The shared tables in a real Dagster instance: "Materialize" publishes `fleet.duckdb` again."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.assets.specs import table_key
from sr_assets.definitions import build
from sr_assets.settings import Settings, load_settings
from sr_assets_tests.published import MINUTE_NS, SITE, STREAM, node_row, publish_message, publish_nodes

TABLES = ("last_seen_nodes", "replication", "node_snapshots")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A configured site with two nodes, one silent."""
    file = tmp_path / "replication.yaml"
    tracked = "inspect_field: sender, inspect_duration: 1h"
    file.write_text(
        f"name: HUB\nstreams:\n  - {{name: {SITE}, stream: {STREAM}, source_url: a:1, target_url: b:1, {tracked}}}\n"
    )
    settings = load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)})
    publish_nodes(settings.home, node_row("web1", "up", 0), node_row("web|2", "timeout", 40 * MINUTE_NS))
    return settings


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def materialize(settings: Settings, instance: dg.DagsterInstance, *tables: str) -> dg.ExecuteInProcessResult:
    """Execute the run that "Materialize" on these tables starts."""
    job = build(settings).resolve_implicit_global_asset_job_def()
    keys = [table_key(settings, table) for table in tables]
    return job.execute_in_process(instance=instance, asset_selection=keys, raise_on_error=False)


@pytest.mark.parametrize("tables", (TABLES, TABLES[:1]), ids=["several", "one"])
def test_materialize_publishes_the_file_and_records_row_counts(
    settings: Settings, instance: dg.DagsterInstance, tables: tuple[str, ...]
) -> None:
    file = settings.home / "fleet.duckdb"
    file.unlink()
    result = materialize(settings, instance, *tables)
    assert result.success
    with open_fleet(settings.home) as fleet:
        assert fleet.execute("SELECT run_id FROM snapshot_info").fetchall() == [(result.run_id,)]
        counts = {table: len(fleet.execute(f"SELECT * FROM {table}").fetchall()) for table in tables}
    assert counts["last_seen_nodes"] == 2
    recorded = {}
    for table in tables:
        event = instance.get_latest_materialization_event(table_key(settings, table))
        assert event is not None
        assert event.asset_materialization is not None
        recorded[table] = event.asset_materialization.metadata["dagster/row_count"].value
    assert recorded == counts
    assert instance.get_latest_materialization_event(table_key(settings, "gaps")) is None


def test_materialize_replaces_the_rows_of_a_damaged_file(settings: Settings, instance: dg.DagsterInstance) -> None:
    (settings.home / "fleet.duckdb").write_bytes(b"damaged")
    assert materialize(settings, instance, "replication").success
    with open_fleet(settings.home) as fleet:
        assert fleet.execute("SELECT name, stream FROM replication").fetchall() == [(SITE, STREAM)]


def test_materialize_shows_the_first_rows_without_payloads(settings: Settings, instance: dg.DagsterInstance) -> None:
    publish_message(settings.home, "web1")
    result = materialize(settings, instance, *TABLES)
    shown = {
        event.asset_key.path[-1]: str(event.metadata["first_rows"].value)
        for event in result.asset_materializations_for_node("fleet_tables")
    }
    assert "| web\\|2 |" in shown["last_seen_nodes"]
    header, _, row = shown["node_snapshots"].splitlines()
    assert header == "| name | stream | node | sequence | stored_at | subject | payload_bytes |"
    assert row.startswith(f"| {SITE} | {STREAM} | web1 | 7 |")


def test_materialize_fails_before_any_site_has_published(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    file = tmp_path / "replication.yaml"
    file.write_text(f"name: HUB\nstreams: [{{name: {SITE}, stream: {STREAM}, source_url: a:1, target_url: b:1}}]\n")
    result = materialize(load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}), instance, "replication")
    (failure,) = result.get_step_failure_events()
    assert "nothing is published yet" in str(failure.step_failure_data.user_failure_data)
    assert not (tmp_path / "fleet.duckdb").exists()
