"""The picture `docs/asset-graph.png`, taken from a running demo: `python -m sr_assets_bench.screenshot [file]`."""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect

from sr_assets_tests.browser import find_chromium, open_page
from sr_assets_tests.demo_process import DemoProcess

_FILE = Path(__file__).parent.parent / "docs" / "asset-graph.png"
_PORT = 3791
#: Three lag sensors, `topology_watch`, `run_failures`, two hourly schedules and `nightly_retention`.
_SWITCHES = 8
_SHOWN = "['checks', 'latest-event', 'status', 'kind-tag']"


def main(file: Path) -> None:
    """Start a demo, wait until every asset is materialised, and take the screenshot."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("chromium is not installed (Debian: apt-get install chromium)")
    with (
        tempfile.TemporaryDirectory() as folder,
        DemoProcess(Path(folder), "--port", str(_PORT)) as demo,
        open_page(chromium, 2200, 2200) as page,
    ):
        expect.set_options(timeout=120_000)
        # The centre runs after the cities have published their first advisories.
        demo.await_output("centre: ")
        _take(page, f"http://127.0.0.1:{_PORT}", file)


def _take(page: Page, url: str, file: Path) -> None:
    page.add_init_script(f"localStorage.setItem('asset-node-facets', JSON.stringify({_SHOWN}))")
    _let_runs_end(page, url)
    page.goto(f"{url}/asset-groups?expanded=global@global:london,global@global:paris,global@global:centre")
    page.get_by_text("Hide navigation").click()
    page.get_by_text("node_advisories", exact=True).first.wait_for()
    page.get_by_label("panel_show_right").last.click()
    # Each city has two replicas, of its nodes and of its advisories; the centre has a feed.
    for passed, count in (("7 / 7 Passed", 2), ("6 / 6 Passed", 2), ("3 / 3 Passed", 1)):
        expect(page.get_by_text(passed)).to_have_count(count)
    expect(page.get_by_text("Materializing")).to_have_count(0)
    page.screenshot(path=file)


def _let_runs_end(page: Page, url: str) -> None:
    """Switch the sensors off, so that no asset is in progress in the screenshot."""
    page.goto(f"{url}/automation")
    page.get_by_text("paris_lag").first.wait_for()
    switched_on = page.locator("input[type=checkbox]:checked")
    expect(switched_on).to_have_count(_SWITCHES)
    for left in reversed(range(_SWITCHES)):
        switched_on.first.evaluate("box => box.click()")
        expect(switched_on).to_have_count(left)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _FILE)
