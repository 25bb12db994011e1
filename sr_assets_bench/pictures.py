"""The pictures of the documents, taken from a running demo: `python -m sr_assets_bench.pictures`; needs chromium."""

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path
from typing import Any

import pyte
from PIL import Image
from playwright.sync_api import Page, expect
from rich.console import Console
from rich.style import Style
from rich.text import Text

from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets_tests.browser import find_chromium, open_page
from sr_assets_tests.rig import wait_until
from sr_assets_tests.servers import free_port

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
COLUMNS, ROWS = 120, 40
#: Commands whose output is a picture.
COMMANDS = {
    "nodes": "nodes --status timeout",
    "lag": "lag",
    "summary": "summary",
    "report": "report",
    "advisories": "advisories --since 10s",
}
_PATIENCE_SECONDS = 300.0
_COLOURS = 96
#: What Dagster's graph shows of a node.
_SHOWN = "['checks', 'latest-event', 'status', 'kind-tag']"
#: Three lag sensors, `topology_watch`, `run_failures`, two hourly schedules and `nightly_retention`.
_SWITCHES = 8


class Terminal:
    """A command on a terminal of its own; `written` is its whole output, and `draw` shows the screen."""

    def __init__(self, title: str, environ: dict[str, str], *further: str) -> None:
        self._title, arguments = title, (*title.split(), *further)
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        command = [sys.executable, "-m", "sr_assets", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, **environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,))
        self._reader.start()

    def _read(self, terminal: int) -> None:
        with open(terminal, "rb", buffering=0) as opened:
            try:
                while part := opened.read(1 << 16):
                    self.written += part
                    self._stream.feed(part)
            except OSError:  # the command has ended
                return

    def wait(self) -> None:
        """Wait for the end of the command."""
        self.process.wait(_PATIENCE_SECONDS)
        self._reader.join()

    def draw(self, name: str) -> None:
        """Write the screen as SVG, without the font that a viewer would fetch."""
        lines = [self._line(number) for number in range(ROWS)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(Text("\n").join(lines), no_wrap=True, crop=False)
        svg = console.export_svg(title=f"sr-assets {self._title}")
        svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
        (FOLDER / f"{name}.svg").write_text(svg)

    def _line(self, number: int) -> Text:
        line, text = self._screen.buffer[number], Text()
        for style, cells in itertools.groupby((line[column] for column in range(COLUMNS)), _style):
            text.append("".join(cell.data for cell in cells), style)
        text.rstrip()
        return text


def _style(cell: Any) -> Style:
    """Return the style of a cell of pyte, whose colours have other names in rich."""
    name = re.sub("^bright", "bright_", cell.fg.replace("brown", "yellow"))
    return Style(color=f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else name, bold=cell.bold)


def main() -> None:
    """Start a demo, and take each picture when there is something to see."""
    chromium, port = find_chromium(), free_port()
    assert chromium is not None, "chromium is missing; install it"
    FOLDER.mkdir(exist_ok=True)
    expect.set_options(timeout=120_000)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "fleet"
        environ = {"SR_ASSETS_CONFIG": str(home / "demo.yaml")}
        demo = Terminal("demo", {}, "--home", str(home), "--port", str(port))
        try:
            wait_until(lambda: b"first rows" in demo.written, "first rows", _PATIENCE_SECONDS)
            wait_until(lambda: _is_watched(home), "heartbeats of both cities", _PATIENCE_SECONDS)
            demo.draw("demo")
            for name, arguments in COMMANDS.items():
                shown = Terminal(arguments, environ)
                shown.wait()
                shown.draw(name)
            page_file = Path(folder) / "status.html"
            Terminal("status-page", environ, str(page_file)).wait()
            # The hourly tables now.
            Terminal("run --once", environ).wait()
            with open_page(chromium, 1500, 900) as page:
                page.goto(page_file.as_uri())
                _save(page, "status-page")
                _take_ui(page, f"http://127.0.0.1:{port}")
        finally:
            demo.process.terminate()
            demo.wait()


def _is_watched(home: Path) -> bool:
    """Return whether both cities have sent a heartbeat, and each kind of advisory has happened."""
    with open_fleet(home) as connection:
        watched = read_rows(connection, "SELECT count(*) FROM global_summary WHERE observer = 'ok'").values
        events = read_rows(connection, "SELECT count(DISTINCT event) FROM global_advisories").values
    return (watched[0][0], events[0][0]) == (2, 4)


def _save(page: Page, name: str) -> None:
    """Save what the window shows, with few colours."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(_COLOURS).save(FOLDER / f"{name}.png", optimize=True)


def _take_ui(page: Page, url: str) -> None:
    page.add_init_script(f"localStorage.setItem('asset-node-facets', JSON.stringify({_SHOWN}))")
    _let_runs_end(page, url)
    page.goto(f"{url}/asset-groups?expanded=global@global:london")
    page.get_by_text("Hide navigation").click()
    page.get_by_text("node_advisories", exact=True).first.wait_for()
    page.get_by_label("panel_show_right").last.click()
    expect(page.get_by_text("Materializing")).to_have_count(0)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(3_000)  # the states and the icons come later
    _save(page, "graph")
    page.goto(f"{url}/assets/london/CHORIA_REGISTRATION/node_state?view=events")
    page.get_by_text("lag_messages").first.wait_for()
    _save(page, "node-state")
    page.goto(f"{url}/assets/fleet/availability_daily")
    page.get_by_text("availability_daily").first.wait_for()
    page.wait_for_load_state("networkidle")
    _save(page, "availability")
    page.goto(f"{url}/locations/sr_assets.definitions/jobs/london_replication/runs")
    page.get_by_text("Success").first.wait_for()
    page.locator("a[href*='/runs/']").first.click()
    page.get_by_text("RUN_SUCCESS").first.wait_for()
    _save(page, "run")


def _let_runs_end(page: Page, url: str) -> None:
    """Switch the sensors off, so that no asset is in progress in a picture."""
    page.goto(f"{url}/automation")
    page.get_by_text("paris_lag").first.wait_for()
    switched_on = page.locator("input[type=checkbox]:checked")
    expect(switched_on).to_have_count(_SWITCHES)
    for left in reversed(range(_SWITCHES)):
        switched_on.first.evaluate("box => box.click()")
        expect(switched_on).to_have_count(left)


if __name__ == "__main__":
    main()
