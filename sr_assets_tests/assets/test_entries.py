"""The assets of an entry: the specs, stages and checks of a stream, tracked or not, and of a feed."""

from pathlib import Path

import dagster as dg
import pytest

from sr_assets.assets.entry_assets import entry_assets, selected_stages
from sr_assets.assets.specs import stream_key
from sr_assets.settings import Settings, load_settings
from sr_assets.stages.report import Stage

CONFIGURATION = """
name: US-EAST
streams:
  - {name: london, stream: TRACKED, source_url: a:1, target_url: b:1, inspect_field: sender, inspect_duration: 1h}
  - {name: london, stream: PLAIN, source_url: a:1, target_url: b:1}
feeds:
  - {name: london, stream: FEED, url: b:1}
"""
EXPECTED = {
    "TRACKED": ["node_state", "replica", "node_snapshots", "node_advisories"],
    "PLAIN": ["replica"],
    "FEED": ["advisory_feed"],
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "replication.yaml"
    file.write_text(CONFIGURATION)
    return load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)})


@pytest.mark.parametrize("stream", EXPECTED)
def test_specs_follow_the_stages_in_the_order_of_the_flow(settings: Settings, stream: str) -> None:
    (entry,) = settings.find(stream)
    assets = entry_assets(entry)
    specs = assets.specs(settings)
    assert [spec.key.path[-1] for spec in specs] == EXPECTED[stream]
    assert [stage.value for stage in assets.stages] == EXPECTED[stream]
    recorded: set[dg.AssetKey] = set()
    for spec in specs:
        # Dagster refuses a materialisation that precedes one it depends on.
        upstream = {dep.asset_key for dep in spec.deps} & {other.key for other in specs}
        assert upstream <= recorded, spec.key
        recorded.add(spec.key)
        assert spec.skippable


@pytest.mark.parametrize("stream", EXPECTED)
def test_every_check_belongs_to_an_asset_of_the_entry(settings: Settings, stream: str) -> None:
    (entry,) = settings.find(stream)
    assets = entry_assets(entry)
    checks = assets.check_specs(settings)
    assert checks
    assert {check.asset_key for check in checks} <= {spec.key for spec in assets.specs(settings)}


def test_selected_stages_match_the_selected_assets(settings: Settings) -> None:
    (tracked,), (feed,) = settings.find("TRACKED"), settings.find("FEED")
    keys = {
        stream_key(settings, tracked, "replica"),
        stream_key(settings, tracked, "node_advisories"),
        stream_key(settings, feed, "advisory_feed"),
    }
    assert selected_stages(settings, entry_assets(tracked), keys) == {Stage.REPLICA, Stage.NODE_ADVISORIES}
    assert selected_stages(settings, entry_assets(feed), keys) == {Stage.ADVISORY_FEED}
    assert selected_stages(settings, entry_assets(settings.find("PLAIN")[0]), keys) == frozenset()
