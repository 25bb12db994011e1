"""Dagster's storage in PostgreSQL with `conf/dagster/postgres.yaml`."""

from pathlib import Path

import dagster as dg
import pytest

from sr_assets.operate.instance import prepare_instance
from sr_assets.settings import Settings
from sr_assets_tests.operate.rig import Up, run
from sr_assets_tests.postgres import postgres

EXAMPLE = Path(__file__).parent.parent.parent / "conf" / "dagster" / "postgres.yaml"


# The nightly deletion of runs is tested with this storage.
@pytest.mark.nightly
def test_runs_and_ui_store_everything_in_postgres(platform: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres() as url:
        monkeypatch.setenv("DAGSTER_POSTGRES_URL", url)
        folder = prepare_instance(platform)
        with (folder / "dagster.yaml").open("a") as settings:
            settings.write(EXAMPLE.read_text())
        ended = run("--once", due_work=True)
        assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
        with Up() as up:
            assert up.sensors() == {"london_lag", "paris_lag", "run_failures"}
        with dg.DagsterInstance.from_config(str(folder)) as instance:
            jobs = {record.dagster_run.job_name for record in instance.get_run_records()}
        assert jobs == {"london_replication", "paris_replication", "retention"}
        assert not (folder / "history").exists()
        assert not (folder / "schedules").exists()
