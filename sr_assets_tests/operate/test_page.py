"""The status page: correct numbers, escaped names, access control, rendering in a browser."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from stat import S_IMODE

import pytest
from playwright.sync_api import Page

from sr_assets.adapters.published.status_queries import STEPS, status
from sr_assets.adapters.state.operator_settings import add_windows
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.operate.metrics import Exposition, MetricsServer, page_url
from sr_assets.operate.page import PagePublisher, render_page, write_page
from sr_assets.settings import Settings, load_settings
from sr_assets_tests import test_cli, test_cli_global
from sr_assets_tests.browser import open_page
from sr_assets_tests.programs import chromium
from sr_assets_tests.rig import PATIENCE_SECONDS, Command
from sr_assets_tests.test_cli import MINUTE_NS, NOW_NS, node_row, transition_row

HOSTILE = (
    "<script>document.title = 'owned'</script>",
    '"><img src=x onerror="document.title = 1">',
    "\u202egnp.exe\x1b[31m",
    "{{ 7 * 7 }}",
    "long-" * 100,
    "l" * 300,
)


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a tag."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the configuration of an empty home."""
    file = test_cli.write_configuration(tmp_path, test_cli.configuration(tmp_path / "home"))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    return load_settings()


def publish(settings: Settings) -> None:
    """Publish two nodes that are up, a silent one and a retired one, some with hostile names."""
    statuses = ("up", "timeout", "retired", "up", "up", "up")
    nodes = [node_row(name, status, 0) for name, status in zip(HOSTILE, statuses, strict=True)]
    transitions = [
        transition_row(HOSTILE[0], "new", NOW_NS - 90 * MINUTE_NS, 1),
        transition_row(HOSTILE[1], "timeout", NOW_NS - 10 * MINUTE_NS, 2),
        transition_row(HOSTILE[2], "expire", NOW_NS - 200 * MINUTE_NS, 3),
        transition_row(HOSTILE[3], "recover", NOW_NS - 26 * 60 * MINUTE_NS, 4),
        transition_row(HOSTILE[5], "recover", NOW_NS - 26 * 60 * MINUTE_NS, 5),
    ]
    test_cli.publish(settings.home, nodes, transitions)


def test_chart_counts_back_from_the_current_states(settings: Settings) -> None:
    publish(settings)
    chart = status(settings.home).chart
    assert len(chart) == STEPS
    # A quarter of an hour each: silent for ten minutes, known for ninety, retired for two hundred.
    assert chart[-1] == (4, 1)
    assert chart[-2] == chart[-7] == (5, 0)
    assert chart[-8] == chart[-14] == (4, 0)
    assert chart[-15] == chart[0] == (4, 1)


def test_page_contains_no_script_or_address_from_node_names(settings: Settings, tmp_path: Path) -> None:
    publish(settings)
    file = tmp_path / "status.html"
    file.write_text("an older one")
    write_page(settings, file)
    page = file.read_text()
    assert S_IMODE(file.stat().st_mode) == 0o600
    tags = Tags(page)
    assert tags.tags.isdisjoint({"script", "img", "link", "iframe", "a", "form", "object"})
    assert not {name for name in tags.attributes if name.startswith("on") or name in ("src", "href")}
    assert "&lt;script&gt;" in page
    assert "{{ 7 * 7 }}" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert HOSTILE[5] not in page
    assert f"{HOSTILE[5][:160]}…" in page


def test_page_and_nodes_show_active_maintenance(settings: Settings, command: Command) -> None:
    publish(settings)
    now_ns = time.time_ns()
    over = Window("over", ("*",), now_ns - 9, now_ns - 1)
    active = Window("active", ("l*",), now_ns - 9, now_ns + 3_600_000_000_000, reason="<new> switches")
    add_windows(settings.home / "sites" / "london", [over, active])
    page = render_page(settings)
    assert "maintenance of <bdi>l*</bdi> at <bdi>london</bdi>: <bdi>&lt;new&gt; switches</bdi>" in page
    assert page.count("maintenance of") == 1
    rows = json.loads(command("nodes", "--format", "json")[1])
    assert {row["maintenance"] for row in rows if row["node"].startswith("l")} == {"active"}
    assert {row["maintenance"] for row in rows if not row["node"].startswith("l")} == {None}


def test_page_of_a_centre_lists_the_blind_site_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, file = tmp_path / "home", tmp_path / "replication.yaml"
    file.write_text(test_cli_global.configuration(home, "ADVISORIES"))
    test_cli_global.publish(
        home, [test_cli_global.advisory("web1", "new", 1, 60), test_cli_global.advisory("db1", "new", 1, 30, "paris")]
    )
    write_page(load_settings(file, {}), tmp_path / "status.html")
    page = (tmp_path / "status.html").read_text()
    sites = page[page.index('id="sites"') : page.index('id="replication"')]
    assert sites.index("london") < sites.index("blind") < sites.index("paris")
    assert "1 site is blind" in page
    assert page.index("db1") < page.index("web1")


def test_unwritable_page_is_reported_in_one_line(settings: Settings, tmp_path: Path, command: Command) -> None:
    code, _, error = command("status-page", str(tmp_path / "status.html"))
    assert (code, error.count("\n")) == (1, 1)
    assert "nothing is published yet" in error
    publish(settings)
    code, _, error = command("status-page", str(tmp_path / "gone" / "status.html"))
    assert (code, error.count("\n")) == (1, 1)
    assert "gone/status.html: cannot be written: No such file or directory" in error
    assert command("status-page", str(tmp_path / "status.html"))[0] == 0


def test_page_is_served_only_to_readers_of_the_tables(settings: Settings) -> None:
    assert "nothing is published yet" in PagePublisher(settings).page()
    publish(settings)
    with MetricsServer(Exposition(settings), "127.0.0.1", 0, PagePublisher(settings)) as metrics:
        for path in ("/", "/status"):
            with urllib.request.urlopen(metrics.replace("/metrics", path), timeout=PATIENCE_SECONDS) as answer:
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert "US-EAST" in answer.read().decode()
        # DNS rebinding: another host name that resolves to this server.
        foreign = urllib.request.Request(page_url(metrics), headers={"Host": "rebound.example.net"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(foreign, timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Page]:
    """Open a page in Chromium as wide as a phone."""
    with open_page(chromium(), width=375, height=800) as page:
        yield page


@pytest.mark.browser
@pytest.mark.process
def test_page_fits_a_phone_in_light_and_dark_mode(settings: Settings, tmp_path: Path, browser_page: Page) -> None:
    publish(settings)
    write_page(settings, tmp_path / "status.html")
    asked: list[str] = []
    said: list[str] = []
    browser_page.on("request", lambda request: asked.append(request.url))
    browser_page.on("console", lambda message: said.append(message.text))
    address = (tmp_path / "status.html").as_uri()
    grounds = set()
    for width in (375, 1200):
        browser_page.set_viewport_size({"width": width, "height": 800})
        for scheme in ("light", "dark"):
            browser_page.emulate_media(color_scheme=scheme)
            browser_page.goto(address)
            assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
            assert browser_page.title() == "US-EAST · sr-assets"
            assert browser_page.get_by_text(HOSTILE[0]).first.is_visible()
            grounds.add(browser_page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    assert set(asked) == {address}
    assert not said
