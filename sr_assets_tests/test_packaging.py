"""What a clone and an installed package carry beside the code: pins, the Dagster instance's settings, the workspace."""

import re
from pathlib import Path

import yaml
from dagster import DagsterInstance

from sr_assets.settings import load_settings

ROOT = Path(__file__).parent.parent


def test_the_dagster_yaml_of_the_package_is_the_one_at_the_root() -> None:
    assert (ROOT / "dagster.yaml").read_bytes() == (ROOT / "sr_assets" / "dagster.yaml").read_bytes()


def test_the_demo_configuration_of_the_package_is_the_one_in_conf() -> None:
    assert (ROOT / "conf" / "demo.yaml").read_bytes() == (ROOT / "sr_assets" / "embedded" / "demo.yaml").read_bytes()


def test_dagster_accepts_the_instance_settings(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_bytes((ROOT / "dagster.yaml").read_bytes())
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert not instance.telemetry_enabled
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_runtime_seconds > 0
        assert instance.run_monitoring_settings["free_slots_after_run_end_seconds"] > 0
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        assert queue.max_concurrent_runs == -1


def test_the_constraints_are_exact_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_the_workspace_loads_the_definitions_module() -> None:
    workspace = yaml.safe_load((ROOT / "workspace.yaml").read_text())
    assert workspace == {"load_from": [{"python_module": "sr_assets.definitions"}]}


def test_the_demo_configuration_is_accepted() -> None:
    urls = {
        f"SR_DEMO_{site}_URL": f"nats://127.0.0.1:{port}" for port, site in enumerate(("LONDON", "PARIS", "CENTRE"), 1)
    }
    settings = load_settings(ROOT / "conf" / "demo.yaml", {**urls, "SR_DEMO_HOME": "/var/lib/demo"})
    assert list(settings.sites) == ["london", "paris", "centre"]
    assert [stream.stream for stream in settings.streams if stream.tracked] == ["CHORIA_REGISTRATION"] * 2
    assert [feed.stream for feed in settings.feeds] == ["ADVISORIES"]
    assert not settings.warnings
