"""The effect of the rules of operators in Dagster, on the status page and in the commands."""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.status_queries import RecentNodes, recent_nodes, site_outages
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.operator_settings import add_windows
from sr_assets.adapters.state.store import SiteState
from sr_assets.assets.charts import nodes_chart
from sr_assets.assets.entry_assets import rules_metadata, transition_table, withheld_metadata
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.operate.page import render_page
from sr_assets.settings import load_settings
from sr_assets.stages.tracking.windows import active_spans
from sr_assets_tests.announcing import BEGIN_NS, SECOND, configured, fold
from sr_assets_tests.rig import Command

WINDOW = Window("w1", ("flap*",), BEGIN_NS, 2 * 10**18 + BEGIN_NS, reason="new | switches")
RULES: dict[str, Any] = {
    "outage_guard": {"partial": "55%", "min_nodes": 4, "hold": "1h"},
    "flapping": {"transitions": 4, "within": "5m"},
    "classes": [{"name": "web", "match": "web*"}, {"name": "db", "match": "db*"}],
}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SiteState]:
    """A site with a dark outage, which holds six nodes, a flapping node, and a window; not closed here."""
    stream = configured(tmp_path, **RULES)
    nodes = ("web1", "web2", "db1", "db2", "db3", "flappy")
    sightings = [(second, "flappy") for second in range(0, 60, 15)]
    sightings += [(second, node) for second in range(0, 60, 5) for node in nodes[:5]]
    # Everything is silent from here on, for less than the 20 s of an expiry.
    with SiteState(tmp_path / "sites" / "london") as opened:
        fold(opened, stream, sorted(sightings), [20, 40], 73)
        add_windows(opened.folder, [WINDOW])
        publish_site(
            tmp_path,
            "london",
            opened,
            [PublishedStream("REG", "COPY", tracked=True)],
            sites=["london"],
            run=Run(BEGIN_NS + 73 * SECOND, "run"),
        )
        yield opened


def test_metadata_shows_outage_windows_and_flapping_nodes(state: SiteState, tmp_path: Path) -> None:
    stream = load_settings(tmp_path / "replication.yaml", {"SR_ASSETS_HOME": str(tmp_path)}).streams[0]
    shown = rules_metadata(state, stream)
    assert str(shown.pop("maintenance").value).splitlines()[2].startswith(r"| w1 | flap\* | 2089-")
    assert str(shown.pop("outage")).startswith("dark since 2026-01-03T00:00:")
    assert shown == {
        "outage_level": 2,
        "held_transitions": 6,
        "suppressed_transitions": 0,
        "flapping_nodes": 1,
        "maintenance_windows": 1,
    }
    withheld = withheld_metadata(state, stream)
    assert "| dark | 2026-01-03T00:01:" in str(withheld["site_events"].value)
    assert "| flapping | flappy | 2026-01-03T00:00:" in str(withheld["node_events"].value)
    assert str(transition_table(state.outbox("REG").newest(20)).value).count("| held by ") >= 5


def test_commands_show_flapping_and_withheld_nodes(
    state: SiteState, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    monkeypatch.setenv("SR_ASSETS_HOME", str(tmp_path))
    rows = {row["node"]: row for row in json.loads(command("nodes", "--format", "json")[1])}
    (outage,) = state.guard("REG").outages()
    assert {node: row["withheld_by"] for node, row in rows.items()} == dict.fromkeys(rows, outage.id)
    assert [node for node, row in rows.items() if row["flapping"]] == ["flappy"]
    (shown,) = json.loads(command("node", "flappy", "--format", "json")[1])
    assert (shown["flapping"], shown["withheld_by"], shown["maintenance"]) == (True, outage.id, "w1")
    (web,) = json.loads(command("node", "web1", "--format", "json")[1])
    assert web["class"] == "web"
    assert [(each["event"], each["announced_at"] is None) for each in web["history"]] == [
        ("new", False),
        ("timeout", True),
    ]


def test_page_shows_the_outage_with_its_held_nodes(state: SiteState, tmp_path: Path) -> None:
    page = render_page(load_settings(tmp_path / "replication.yaml", {"SR_ASSETS_HOME": str(tmp_path)}))
    assert state.guard("REG").outages()
    assert "</bdi> is dark since 2026" not in page
    assert "5 of 5 nodes are silent" in page
    assert "not announced: 6 silent nodes, held by an outage" in page
    assert "<small>6 held</small>" in page
    assert '<small class="warn">1 flapping</small>' in page
    assert "classes: <bdi>db 3, web 2</bdi>" in page


def test_chart_of_the_nodes_shades_outages_and_maintenance(state: SiteState, tmp_path: Path) -> None:
    recent = recent_nodes(tmp_path)
    settings = load_settings(tmp_path / "replication.yaml", {"SR_ASSETS_HOME": str(tmp_path)})
    (outage,) = recent.outages
    assert outage["dark_at"] >= outage["began_at"]
    assert outage["restored_at"] is None
    assert [row[5] for row in site_outages(tmp_path, recent.as_of.date(), 9).values] == [5]
    (span,) = active_spans(settings, recent)
    assert span == (datetime.fromtimestamp(BEGIN_NS / SECOND, UTC), recent.as_of)
    plain = picture(replace(recent, outages=[]), [])
    assert {picture(recent, []), picture(replace(recent, outages=[]), [span])}.isdisjoint({plain})


def picture(recent: RecentNodes, maintenance: list[tuple[datetime, datetime]]) -> bytes:
    """Return the pixels of a chart."""
    text = str(nodes_chart(recent, maintenance).value)
    data = base64.b64decode(text.partition("base64,")[2][:-1])
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()
