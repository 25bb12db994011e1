"""The demo's UI in a browser: asset graph, asset page, checks, sensors and a backfill."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest
from playwright.sync_api import Page, expect

from sr_assets_tests.browser import open_page
from sr_assets_tests.demo_process import DemoProcess
from sr_assets_tests.programs import chromium
from sr_assets_tests.rig import wait_until
from sr_assets_tests.servers import free_port

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600)]
_PATIENCE_MS = 180_000


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's home."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo_url(demo_folder: Path) -> Iterator[str]:
    """The UI of a demo that has published its first tables."""
    chromium()
    port = free_port()
    with DemoProcess(demo_folder, "--port", str(port), "--nodes", "20") as demo:
        demo.await_output("first rows")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def page(demo_url: str) -> Iterator[Page]:
    """A page in Chromium."""
    with open_page(chromium()) as page:
        yield page


def test_graph_leads_to_an_asset_with_its_metadata(demo_url: str, page: Page) -> None:
    page.goto(f"{demo_url}/asset-groups")
    for group in ("london", "paris", "centre", "topology", "fleet"):
        expect(page.get_by_text(group, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
    page.goto(f"{demo_url}/asset-groups?expanded=global@global:london")
    for noun in ("source", "replica", "node_snapshots", "node_state", "node_advisories"):
        expect(page.get_by_text(noun, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
    page.get_by_text("replica", exact=True).first.click()
    page.get_by_role("link", name="View in Asset Catalog").click()
    expect(page).to_have_url(re.compile("/assets/london/CHORIA_[A-Z]+/replica"), timeout=_PATIENCE_MS)
    for key in ("copied_messages", "lag_messages", "next_sequence", "settings_digest"):
        expect(page.get_by_text(key, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)


def test_asset_page_shows_checks(demo_url: str, page: Page) -> None:
    page.goto(f"{demo_url}/assets/london/CHORIA_REGISTRATION/replica?view=checks")
    for check in ("no_gap", "in_order", "no_loss", "senders_found"):
        expect(page.get_by_text(check, exact=True).first).to_be_visible(timeout=_PATIENCE_MS)


def test_all_sensors_and_schedules_are_on(demo_url: str, page: Page) -> None:
    page.goto(f"{demo_url}/automation")
    automations = (
        "london_lag",
        "paris_lag",
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
    assert {name for (name,) in cities} == {"london", "paris"}
    computed = {file.stem for file in (home / "availability").glob("*.parquet")}
    assert computed >= {f"{today - timedelta(days=number)}" for number in range(3)}
