"""The report of `measure` and the page of `compare` in a browser, opened from disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page

from sr_assets.cli import run_command
from sr_assets.measure.html_report import render_report
from sr_assets.measure.results import ResultFolder, Trial
from sr_assets_tests.browser import open_page
from sr_assets_tests.programs import chromium

pytestmark = [pytest.mark.browser, pytest.mark.process]

BACKGROUNDS = {"light": "rgba(0, 0, 0, 0)", "dark": "rgb(21, 24, 27)"}
#: The height of the visible ink of each plot, in pixels: a path without a size or a colour has none.
INK = """
() => [...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('path')].filter(path => {
    const style = getComputedStyle(path), shown = style.stroke !== 'none' || style.fill !== 'none';
    return shown && path.getBoundingClientRect().width > 100;
}).length)
"""


def write_result(folder: Path, milliseconds: int) -> None:
    """Write a whole result with two kinds of tests."""
    about = {"suite": "pipeline", "nodes": [200]}
    times = [(number % 90 + milliseconds) * 1_000_000 for number in range(200)]
    with ResultFolder(folder, about) as results:
        results.tests += [Trial(f"stored → {end}", 200, 200, times) for end in ("copied", "queryable")]
        results.complete(lambda: render_report([("pipeline", about, results.tests)]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report, and a page that compares it with another one."""
    folder = tmp_path_factory.mktemp("results")
    for name, milliseconds in (("a", 5), ("b", 50)):
        write_result(folder / name, milliseconds)
    assert run_command(["compare", str(folder / "a"), str(folder / "b"), "-o", str(folder / "both.html")]) == 0
    return {"report": folder / "a" / "report.html", "both": folder / "both.html"}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page in Chromium."""
    with open_page(chromium()) as page:
        yield page


@pytest.mark.parametrize(
    ("name", "plots", "scheme"),
    (
        ("report", 2, "light"),
        ("both", 4, "dark"),
        pytest.param("report", 2, "dark", marks=pytest.mark.nightly),
        pytest.param("both", 4, "light", marks=pytest.mark.nightly),
    ),
)
def test_page_from_disk_shows_its_plots(
    pages: dict[str, Path], page: Page, name: str, plots: int, scheme: Literal["light", "dark"]
) -> None:
    requests, problems = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.emulate_media(color_scheme=scheme)
    address = pages[name].as_uri()
    page.goto(address, wait_until="load")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[scheme]
    assert len([ink for ink in page.evaluate(INK) if ink >= 3]) == plots
    # It fits the window, and no part of it comes from elsewhere.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert (set(requests), problems) == ({address}, [])
