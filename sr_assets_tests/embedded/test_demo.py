"""The demo as a user runs it: on a machine with Python alone, its UI in a browser, its result, and stopped at any time."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from io import StringIO
from pathlib import Path

import duckdb
import pytest
from playwright.sync_api import Page, expect
from rich.console import Console

from sr_assets.adapters.published.fleet_reader import Rows, count_rows
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.positions import DAY_NS
from sr_assets.embedded.demo import CITIES, _table, configuration, run_demo
from sr_assets.settings import load_settings
from sr_assets.stages.daily_computation import AVAILABILITY_STAGE, INVENTORY_STAGE, DailyStage
from sr_assets_tests.browser import open_page
from sr_assets_tests.demo_process import DemoProcess
from sr_assets_tests.operate.rig import SIGNALLED_AGAIN
from sr_assets_tests.programs import chromium
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until
from sr_assets_tests.servers import free_port
from sr_assets_tests.terminal import Terminal

NODES = 40
_PATIENCE_MS = 180_000


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine without Java: a HOME, and a PATH with everything else."""
    home = tmp_path_factory.mktemp("bare")
    programs = home / "bin"
    programs.mkdir()
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        if not program.name.startswith("java") and not (programs / program.name).is_symlink():
            (programs / program.name).symlink_to(program)
    return {"HOME": str(home), "PATH": str(programs)}


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the home of the demo that tests share."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def port() -> int:
    """The port of the shared demo's UI."""
    return free_port()


@pytest.fixture(scope="module")
def demo(demo_folder: Path, bare: dict[str, str], port: int) -> Iterator[DemoProcess]:
    """A demo of one city that has published its first tables; the test of its end ends it."""
    arguments = ("--port", str(port), "--sites", "1", "--nodes", str(NODES))
    with DemoProcess(demo_folder, *arguments, environ=bare) as demo:
        demo.await_output("first rows")
        yield demo


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page in Chromium."""
    with open_page(chromium()) as page:
        yield page


@pytest.fixture
def demo_url(demo: DemoProcess, port: int) -> str:
    """The UI of the shared demo."""
    assert demo.process.poll() is None, demo.errors
    return f"http://127.0.0.1:{port}"


def _scrape(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        metrics: bytes = answer.read()
        return metrics


def await_metrics(demo: DemoProcess) -> None:
    """Wait until the demo's metrics show nodes."""
    address = re.search(r"http://127\.0\.0\.1:\d+/metrics", demo.written + demo.errors)
    assert address, demo.written + demo.errors
    demo.await_condition(lambda: b"sr_assets_nodes{" in _scrape(address[0]), "its metrics")


# The assets and their metadata are those of the definitions, whose tests show them.
@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.process
@pytest.mark.timeout(600)
def test_graph_leads_to_an_asset_with_its_metadata(demo_url: str, page: Page) -> None:
    page.goto(f"{demo_url}/asset-groups")
    for group in ("london", "centre", "topology", "fleet"):
        expect(page.get_by_text(group, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
    page.goto(f"{demo_url}/asset-groups?expanded=global@global:london")
    for noun in ("source", "replica", "node_snapshots", "node_state", "node_advisories"):
        expect(page.get_by_text(noun, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
    page.get_by_text("replica", exact=True).first.click()
    page.get_by_role("link", name="View in Asset Catalog").click()
    expect(page).to_have_url(re.compile("/assets/london/CHORIA_[A-Z]+/replica"), timeout=_PATIENCE_MS)
    for key in ("copied_messages", "lag_messages", "next_sequence", "settings_digest"):
        expect(page.get_by_text(key, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)


# The checks and automations are those of the definitions, whose tests show them; each page takes a demo ten seconds.
@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.process
@pytest.mark.timeout(600)
def test_asset_page_shows_checks(demo_url: str, page: Page) -> None:
    page.goto(f"{demo_url}/assets/london/CHORIA_REGISTRATION/replica?view=checks")
    for check in ("no_gap", "in_order", "no_loss", "senders_found"):
        expect(page.get_by_text(check, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)


@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.process
@pytest.mark.timeout(600)
def test_all_sensors_and_schedules_are_on(demo_url: str, page: Page) -> None:
    page.goto(f"{demo_url}/automation")
    automations = (
        "london_lag",
        "centre_lag",
        "topology_watch",
        "run_failures",
        "hourly_availability",
        "hourly_inventory",
        "nightly_retention",
    )
    for automation in automations:
        expect(page.get_by_text(automation, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
    # The switches are check boxes.
    expect(page.locator("input[type=checkbox]:checked")).to_have_count(len(automations), timeout=_PATIENCE_MS)


# Without the dialog, the tests of the daily assets compute several days in one run.
@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.process
@pytest.mark.timeout(600)
def test_dialog_backfills_three_days_of_availability(demo_url: str, demo_folder: Path, page: Page) -> None:
    # The schedule computes only the last two days.
    today = datetime.now(UTC).date()
    asset = f"{demo_url}/assets/fleet/availability_daily?view=partitions"
    page.goto(asset)
    page.get_by_role("button", name="Materialize").first.click()
    dialog = page.get_by_role("dialog").filter(has_text="Partition selection")
    # No partition is selected yet.
    days = dialog.get_by_placeholder("No matching partitions")
    days.fill(f"[{today - timedelta(days=2)}...{today}]")
    days.press("Enter")
    expect(dialog.get_by_text("3 partitions", exact=True)).to_be_visible(timeout=_PATIENCE_MS)
    dialog.get_by_role("button", name="Launch backfill").click()
    # The dialog closes when the backfill is stored.
    expect(dialog).to_be_hidden(timeout=_PATIENCE_MS)
    materialized = page.get_by_text(re.compile(r"^Materialized \(\d+\)$"))

    def shows_three() -> bool:
        page.goto(asset)
        return materialized.inner_text() == "Materialized (3)"

    wait_until(shows_three, "three materialised days", every=1.0)
    page.goto(f"{asset}&partition={today}")
    expect(page.get_by_text("dagster/row_count", exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
    (home,) = (file.parent for file in demo_folder.glob("*/fleet.duckdb"))
    with duckdb.connect(str(home / "fleet.duckdb"), read_only=True) as fleet:
        cities = fleet.execute("SELECT DISTINCT name FROM availability_daily WHERE date = $1", [today]).fetchall()
    assert {name for (name,) in cities} == {"london"}
    computed = {file.stem for file in (home / "availability").glob("*.parquet")}
    assert computed >= {f"{today - timedelta(days=number)}" for number in range(3)}


# A faster test of its configuration is below.
@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(600)
def test_daily_tables_have_rows_before_the_first_hour(demo: DemoProcess, demo_folder: Path) -> None:
    (home,) = (file.parent for file in demo_folder.glob("*/fleet.duckdb"))

    def have_rows() -> bool:
        rows = count_rows(home)
        return bool(rows["availability_daily"] and rows["inventory_daily"])

    demo.await_condition(have_rows, "rows of the daily tables")


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(600)
def test_terminated_demo_leaves_nothing(demo: DemoProcess, demo_folder: Path) -> None:
    """It runs without Java on the PATH."""
    await_metrics(demo)
    demo.process.terminate()
    assert demo.process.wait(2 * PATIENCE_SECONDS) == 0, demo.errors
    assert demo.left() == []
    assert "Traceback" not in demo.errors
    assert not list(demo_folder.glob("sr-assets-demo-*")), "the temporary home was not deleted"


# The test above ends such a demo, and the tests of the whole platform compare such copies and tables with a reference.
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.process
def test_headless_demo_succeeds_and_leaves_nothing(tmp_path: Path, bare: dict[str, str]) -> None:
    arguments = ("--no-ui", "--for", "45", "--json", "--nodes", str(NODES))
    with DemoProcess(tmp_path, *arguments, environ=bare) as demo:
        demo.await_output("first rows")
        await_metrics(demo)
        code = demo.process.wait()
        assert demo.left() == []
    result = json.loads(demo.written)
    assert result["failed"] == [], demo.errors
    assert code == 0
    assert 45 <= result["seconds"] < 75
    assert set(result["streams"]) == {
        f"{city}/CHORIA_{stream}" for city in ("london", "paris") for stream in ("REGISTRATION", "ADVISORIES")
    }
    for label, stream in result["streams"].items():
        assert stream["lag_messages"] == 0
        assert stream["position"] == stream["source_messages"] == stream["copied"] + stream["skipped"]
        assert stream["copied"] < stream["skipped"] or label.endswith("/CHORIA_ADVISORIES")
    registrations, advisories = (
        {city: result["streams"][f"{city}/CHORIA_{stream}"]["source_messages"] for city in ("london", "paris")}
        for stream in ("REGISTRATION", "ADVISORIES")
    )
    for label, messages in (
        ("LONDON_MIRROR", registrations["london"]),
        ("CITIES_ADVISORIES", sum(advisories.values())),
    ):
        held = {"messages": messages, "origin_messages": messages, "lag_messages": 0}
        assert result["native"].pop(f"centre/{label}") == held
    assert result["native"] == {}
    assert set(result["advisories"]) == {"new", "timeout", "recover", "expire"}
    tables = result["tables"]
    assert tables["node_availability"] == tables["node_snapshots"] == 2 * NODES
    assert tables["last_seen_nodes"] + tables["retired_nodes"] == 2 * NODES
    assert tables["node_advisories"] == sum(result["advisories"].values()) == tables["global_advisories"]
    assert tables["global_availability"] == 2 * NODES
    # A mirror, two sources, four replicas and the feed.
    assert tables["topology_links"] == 8
    assert (tables["global_summary"], tables["global_rejects"]) == (2, 0)
    assert all(result["advisories"].values())
    assert not list(tmp_path.glob("sr-assets-demo-*")), "the temporary home was not deleted"


# A demo that is terminated later leaves nothing either, and neither does an engine whose start is abandoned.
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
@pytest.mark.process
def test_demo_stopped_during_its_start_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with DemoProcess(tmp_path, "--no-ui", "--nodes", "4") as demo:
        demo.await_output("NATS servers")
        # Dagster and Spark are starting.
        demo.await_condition(lambda: len(demo.left()) > 4, "more than the servers")
        demo.process.send_signal(number)
        assert demo.process.wait(PATIENCE_SECONDS) == 0, demo.errors
        assert demo.left() == []
    assert "Traceback" not in demo.errors
    assert not list(tmp_path.glob("sr-assets-demo-*"))


@pytest.mark.parametrize("count", (1, 2, 3, len(CITIES)))
def test_configuration_treats_all_cities_alike(tmp_path: Path, count: int) -> None:
    cities = CITIES[:count]
    urls = {name: f"nats://127.0.0.1:{port}" for port, name in enumerate((*cities, "centre"), 1)}
    file = tmp_path / 'a "demo" of ours.yaml'
    file.write_text(configuration(cities, file.with_suffix(""), urls))
    settings = load_settings(file, {})
    assert settings.home == file.with_suffix("")
    assert tuple(settings.sites) == (*cities, "centre")
    registrations, advisories = settings.streams[::2], settings.streams[1::2]
    for number, (stream, advisory_stream) in enumerate(zip(registrations, advisories, strict=True), 1):
        for entry in (stream, advisory_stream):
            assert entry.name == cities[number - 1]
            assert entry.source.servers == (f"127.0.0.1:{number}",)
            assert entry.target.servers == (f"127.0.0.1:{count + 1}",)
        assert stream.target_stream == f"{stream.name.upper()}_REGISTRATION"
        assert stream.prefix == stream.name
        assert stream.policy == settings.streams[0].policy
        assert stream.advisory is not None
        assert stream.advisory.subject == f"choria.stream.advisories.{stream.name}.%s.%v"
        assert (advisory_stream.stream, advisory_stream.target_stream) == ("CHORIA_ADVISORIES", "ADVISORIES")
        assert not advisory_stream.tracked
    assert settings.topology is not None
    assert set(settings.topology.clusters) == {"centre", *cities}
    mirror, gathered = settings.topology.streams
    assert mirror.mirror is not None
    assert mirror.mirror.api == "$JS.london.API"
    assert [upstream.cluster for upstream in gathered.sources] == list(cities)
    for source in {entry.source for entry in settings.entries}:
        assert settings.topology.cluster_of(source), "it is joined to the native streams"
    (feed,) = settings.feeds
    assert (feed.stream, feed.source) == ("ADVISORIES", advisories[0].target)


@pytest.mark.parametrize("stage", (AVAILABILITY_STAGE, INVENTORY_STAGE), ids=lambda stage: stage.table.name)
def test_demo_keeps_the_history_that_a_daily_table_needs(tmp_path: Path, stage: DailyStage) -> None:
    file = tmp_path / "demo.yaml"
    urls = {name: f"nats://127.0.0.1:{port}" for port, name in enumerate((*CITIES[:2], "centre"), 1)}
    file.write_text(configuration(CITIES[:2], tmp_path, urls))
    settings = load_settings(file, {})
    # Days begin at midnight UTC.
    assert stage.earliest_input(settings, 10 * DAY_NS) <= date(1970, 1, 10), "yesterday cannot be computed"
    assert settings.warnings == ()


@pytest.mark.parametrize(("columns", "omitted"), ((80, " (not shown: as of)"), (120, "")))
def test_summary_omits_whole_columns_on_a_narrow_terminal(columns: int, omitted: str) -> None:
    at = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
    names = ("name", "observer", "up", "timeout", "retired", "last_advisory_at", "observer_alive_at", "as_of")
    rows = Rows(names, [("london", "ok", 85, 5, 10, at, at, at), ("paris", "ok", 90, 0, 10, at, None, at)])
    console = Console(file=StringIO(), width=columns)
    with console.capture() as shown:
        console.print(_table(console, rows, "centre"))
    title, header, _, *lines = (line.rstrip() for line in shown.get().splitlines())
    assert title == f"centre{omitted}"
    assert header.startswith("name    observer  up  timeout  retired  last advisory at     observer alive at")
    assert header.endswith("as of") == (not omitted)
    assert [line.split()[0] for line in lines] == ["london", "paris"]
    assert "…" not in shown.get()


# The test above, on the terminal of a demo.
@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(600)
def test_summary_fits_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    terminal = Terminal("demo", "--no-ui", "--nodes", str(NODES), size=(80, 24))
    silent, erased = "\x1b[33mtimeout", "\x1b[2K"
    try:
        assert silent in terminal.read(silent)
    finally:
        terminal.process.terminate()
    assert terminal.end()[0] == 0, terminal.shown
    screen = terminal.screen(terminal.shown.index(erased, terminal.shown.index(silent)))
    # Wide values leave no room for some columns, which the title names.
    summary = screen[[line.partition(" (")[0] for line in screen].index("sites") :]
    titles = [line.partition(" (")[0] for line in summary if line[:1].isalpha() and "  " not in line]
    assert titles == ["sites", "centre, from their advisories", "newest transitions"]
    assert "…" not in "".join(summary)
    assert "first rows" in terminal.screen()[-1], "the summary was not removed"


def test_home_with_other_files_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="is neither empty nor a demo"):
        run_demo(home=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]


#: A demo that runs queries when the signal arrives: DuckDB ends one with an error of its own, at the latest when its threads
#: have completed it. Before a query begins, DuckDB may lose the exception of a signal; then the next signal counts.
_QUERYING = """
import os, signal, sys, threading
import duckdb
from sr_assets.embedded import demo

def query(*_: object, **__: object) -> None:
    for seconds in range(1, 100, 5):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
    while True:
        duckdb.sql("SELECT sum(sin(range)) FROM range(10_000_000)").fetchall()

demo._Demo.run = query
sys.exit(demo.run_demo(ui=False))
"""


#: A demo that gets two signals.
_SIGNALLED = f"""
{SIGNALLED_AGAIN}
from sr_assets.embedded import demo

demo._Demo.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
sys.exit(demo.run_demo(ui=False))
"""


@pytest.mark.parametrize("program", (_QUERYING, _SIGNALLED), ids=("query", "second signal"))
@pytest.mark.process
def test_signal_ends_the_demo_as_usual(program: str, tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert not list(tmp_path.glob("sr-assets-demo-*"))
