"""`forget`: deletes the rows and files of removed sites and streams, and keeps configured ones."""

from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.history import stream_folder
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.range_rows import Advisories
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.operator_settings import paused_streams, set_paused
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.messages import Message
from sr_assets.settings import load_settings
from sr_assets_tests.published import NOW_NS, STREAM, node_row, publish_message, publish_nodes
from sr_assets_tests.rig import Command
from sr_assets_tests.test_cli_global import NOW, SECOND_NS, advisory, publish

#: Entries: the published site's stream, another stream of that site, another site, and a centre.
_OLD = f"{{name: london, stream: {STREAM}, source_url: a, target_url: b}}"
_NEW = "{name: london, stream: NEW, source_url: a, target_url: b}"
_PARIS = "{name: paris, stream: NEW, source_url: a, target_url: b}"
_CENTRE = "feeds: [{name: centre, stream: ADVISORIES, url: 'nats://127.0.0.1:1'}]"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a published site of two nodes and one message in the history; only `_PARIS` is configured."""
    home = tmp_path / "home"
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    publish_nodes(home, node_row("web1", "up", 0), node_row("web2", "retired", 0))
    publish_message(home, "web1")
    configure(home, _PARIS)
    return home


def configure(home: Path, *streams: str, feeds: str = "") -> None:
    text = f"name: EAST\nstate_store: {home}\nstreams: [{', '.join(streams)}]\n{feeds}\n"
    (home.parent / "replication.yaml").write_text(text)


def count(home: Path, table: str, condition: str = "true") -> int:
    with open_fleet(home) as opened:
        return int(opened.execute(f"SELECT count(*) FROM {table} WHERE {condition}").fetchall()[0][0])


# ------------------------------------------------------------------------------------------------------- at a site


def test_forget_deletes_rows_folder_and_history_of_removed_site(home: Path, command: Command) -> None:
    assert (count(home, "last_seen_nodes"), count(home, "node_snapshots")) == (1, 1)
    code, output, errors = command("forget", "--site", "london")
    assert (code, errors) == (0, "")
    assert output == "forgot london: 2 nodes, 1 history files\n"
    assert not (home / "sites" / "london").exists()
    assert not list((home / "snapshots").rglob("*.parquet"))
    for table in ("last_seen_nodes", "retired_nodes", "node_snapshots", "replication"):
        assert count(home, table) == 0
    code, _, errors = command("forget", "--site", "london")
    assert code == 2
    assert "--site london is unknown; left from an earlier configuration: nothing" in errors


def test_open_reader_keeps_rows_of_forgotten_site(home: Path, command: Command) -> None:
    rows = "SELECT node, status FROM last_seen_nodes UNION ALL SELECT node, 'retired' FROM retired_nodes ORDER BY node"
    with duckdb.connect(str(home / "fleet.duckdb"), read_only=True) as reader:
        before = reader.execute(rows).fetchall()
        assert command("forget", "--site", "london")[0] == 0
        assert reader.execute(rows).fetchall() == before == [("web1", "up"), ("web2", "retired")]
    assert count(home, "last_seen_nodes") == 0


def test_forget_stream_keeps_rest_of_site(home: Path, command: Command) -> None:
    configure(home, _OLD, _NEW)
    settings = load_settings(home.parent / "replication.yaml", {})
    for stream in settings.streams:
        set_paused(settings, stream, paused=True)
    with SiteState(home / "sites" / "london") as state, state.transaction():
        state.connection.execute("INSERT INTO streams (stream, created_ns, next_sequence) VALUES ('NEW', 1, 5)")
    configure(home, _NEW)
    code, output, errors = command("forget", "--site", "london", "--stream", STREAM)
    assert (code, errors) == (0, "")
    assert output == f"forgot london/{STREAM}: 2 nodes, 1 history files\n"
    with SiteState(home / "sites" / "london") as state:
        assert state.known_streams() == ["NEW"]
    assert not stream_folder(home, "london", STREAM).exists()
    assert count(home, "last_seen_nodes") == count(home, "node_snapshots") == 0
    assert paused_streams(home / "sites" / "london") == {"NEW"}


def test_removed_entry_stays_in_tables_with_warning(home: Path, command: Command) -> None:
    configure(home, _NEW)
    with SiteState(home / "sites" / "london") as state:
        for sites in (["london"], ["paris", "london"]):
            publish_site(home, "london", state, [], sites=sites, run=Run(NOW_NS, "run"))
    assert count(home, "last_seen_nodes") == count(home, "node_snapshots") == count(home, "site_summary") == 1
    code, _, errors = command("check")
    assert (code, errors.count("\n")) == (0, 1)
    assert errors.startswith(f"warning: stream london/{STREAM} has a state, but no entry names it; ")
    assert f"`sr-assets forget --site london --stream {STREAM}`" in errors
    configure(home, _PARIS)
    code, _, errors = command("check")
    assert (code, errors.count("\n")) == (0, 1)
    assert errors.startswith(f"warning: site london has a state ({STREAM}), but no entry has that name; ")
    assert command("nodes")[1].count("web") == 2
    command("forget", "--site", "london")
    assert command("check")[2] == ""


@pytest.mark.parametrize("arguments", ((), ("--stream", STREAM)))
def test_forget_refuses_configured_site(home: Path, command: Command, arguments: tuple[str, ...]) -> None:
    configure(home, _OLD)
    code, output, errors = command("forget", "--site", "london", *arguments)
    assert (code, output) == (2, "")
    assert "is still configured" in errors
    assert "from the configuration first" in errors
    assert count(home, "last_seen_nodes") == 1


@pytest.mark.parametrize("name", ("", ".", "..", "../..", "lundon"))
def test_forget_unknown_site_deletes_nothing(home: Path, command: Command, name: str) -> None:
    code, output, errors = command("forget", "--site", name)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert f"london/{STREAM}" in errors
    assert (home / "sites" / "london" / "state.duckdb").exists()


def test_forget_deletes_unreadable_state(home: Path, command: Command) -> None:
    (home / "sites" / "london" / "state.duckdb").write_bytes(b"not a database" * 1_000)
    assert command("forget", "--site", "london")[0] == 0
    assert not (home / "sites" / "london").exists()


# ----------------------------------------------------------------------------------------------------- at the centre


@pytest.fixture
def centre(home: Path) -> Path:
    """A centre with reports of paris, of two replicators' sites named london, and of an unnamed Stream Replicator."""
    configure(home, _PARIS.replace("paris", "oslo"), feeds=_CENTRE)
    publish(
        home,
        [
            advisory("web1", "new", 1, 7200),
            advisory("web1", "timeout", 2, 600),
            advisory("web9", "new", 1, 600).replace(b'"EAST"', b'"WEST"'),
            advisory("web2", "new", 1, 30, "paris"),
            advisory("db1", "new", 1, 30, "").replace(b'"EAST"', b'"GO"'),
        ],
    )
    return home


def test_forget_reported_site_frees_its_name(centre: Path, command: Command) -> None:
    code, output, errors = command("forget", "--site", "paris")
    assert (code, errors) == (0, "")
    assert output.startswith("forgot EAST/paris in the feeds of centre: 1 nodes, 1 advisories")
    for table in ("global_availability", "global_advisories", "global_summary"):
        assert count(centre, table, "name = 'paris'") == 0
        assert count(centre, table) > 0
    again = Message(99, NOW * SECOND_NS, "adv.x", b"", advisory("web2", "new", 1, 10, "paris"))
    with SiteState(centre / "sites" / "centre") as state, state.transaction():
        state.global_tables.fold("ADVISORIES", Advisories().converter()([again]))
    with SiteState(centre / "sites" / "centre") as state:
        sites = state.global_tables.reported_sites()
    assert ("EAST", "paris", "NODES") in sites


def test_forget_replicator_selects_reported_site(centre: Path, command: Command) -> None:
    # The local site of that name must stay.
    configure(centre, _OLD, feeds=_CENTRE)
    code, _, errors = command("forget", "--site", "london", "--replicator", "NORTH")
    assert code == 2
    assert "EAST/london/NODES" in errors
    assert "WEST/london/NODES" in errors
    assert command("forget", "--site", "london", "--replicator", "WEST")[0] == 0
    assert count(centre, "global_availability", "name = 'london'") == 1
    assert (centre / "sites" / "london" / "state.duckdb").exists()


def test_forget_requires_replicator_for_ambiguous_site(centre: Path, command: Command) -> None:
    code, output, errors = command("forget", "--site", "london", "--stream", "NODES")
    assert (code, output) == (2, "")
    assert "choose one with --replicator: EAST, WEST" in errors


def test_forget_unnamed_stream_replicator_by_replicator_name(centre: Path, command: Command) -> None:
    code, output, _ = command("forget", "--site", "GO")
    assert code == 0
    assert "forgot GO/GO" in output
    assert count(centre, "global_availability", "node = 'db1'") == 0


def test_forget_names_owner_of_locked_centre(centre: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.stages.forgetting._WAIT_SECONDS", 0.0)
    with SiteLock(centre / "sites" / "centre", "run 7", 0.0):
        code, output, errors = command("forget", "--site", "paris")
    assert (code, output) == (1, "")
    assert "site centre is under way: run 7" in errors
