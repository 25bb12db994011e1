"""Homes that earlier versions have written: this version reads them and continues their work.

See `golden`. Each home is opened twice: a few minutes after its recording, whatever the date is, and years from now.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from sr_assets.adapters import times
from sr_assets.adapters.published.catalog import ROWS
from sr_assets.operate.notify import notify_once
from sr_assets_tests.golden import CENTRE, FOLDER, Facts, Golden, unpack
from sr_assets_tests.rig import SITE, Command
from sr_assets_tests.travel import Travel

pytestmark = pytest.mark.process

#: By their dates.
ARCHIVES: Final = sorted(FOLDER.glob("*.tar.xz"), key=lambda file: (file.name.split("-")[-3:], file.name))
MINUTES, YEARS = "minutes", "years"
MINUTE_NS, YEARS_NS = 60 * 10**9, 4 * 366 * 86_400 * 10**9
#: Tables of a site whose rows stay, with the columns that a later run may fill in.
KEPT: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("gaps", "parked_messages", "blind_spans", "node_snapshot_history"), ()),
    **dict.fromkeys(("node_events", "site_events"), ("published_at",)),
    "node_advisories": ("published_at", "announced_at", "held_by", "suppressed_by"),
}
#: Tables whose rows stay in their home; no checkpoint has them.
KEPT_AT_HOME: Final[dict[str, tuple[str, ...]]] = dict.fromkeys(
    ("operator_actions", "global_advisories", "global_rejects"), ()
)
#: The columns that change when a reader renews the views of an earlier version.
REWRITTEN: Final = {"snapshot_info": ("generation", "schema_version"), "site_leaders": ("checkpoint_at",)}
#: The statuses that silence leaves.
SILENT: Final = {"up": {"up", "timeout", "retired"}, "timeout": {"timeout", "retired"}, "retired": {"retired"}}
Row = dict[str, Any]


def cases() -> Iterator[Any]:
    """Yield each archive minutes and years later; in the gate, the newest one years and the others minutes later."""
    for archive in ARCHIVES:
        for later in (MINUTES, YEARS):
            marks = pytest.mark.nightly if (later == YEARS) is not (archive == ARCHIVES[-1]) else ()
            yield pytest.param((archive, later), id=f"{archive.name}-{later}", marks=marks)


@pytest.fixture(params=cases())
def golden(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Golden, str, ExitStack]]:
    """Yield the home of an archive, how much later it is, and what stops its servers, which are not started."""
    archive, later = request.param
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    rig = Golden.at(tmp_path / "golden", Travel(monkeypatch))
    # An archive may be older than this file.
    for file in rig.home.glob("control.db*"):
        file.unlink()
    unpack(archive, rig.folder)
    assert rig.clocks is not None
    rig.clocks.begin(rig.facts()["recorded_ns"] + MINUTE_NS if later == MINUTES else times.time_ns() + YEARS_NS)
    with ExitStack() as servers:
        yield rig, later, servers


def use(rig: Golden, home: Path, command: Command) -> Command:
    """Let the rig use a home; return the command for it."""
    home.mkdir(exist_ok=True)
    rig.home = home
    rig.settings()
    return partial(command, "--config", str(rig.configuration))


def keys(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row["stream"], row["node"]): row for row in rows}


def known(rows: list[Row], like: list[Row], without: Collection[str]) -> list[str]:
    """Return rows as text, in order, with the columns that the recorded rows have; later versions add columns."""
    return sorted(json.dumps([row[name] for name in like[0] if name not in without]) for row in rows) if like else []


def event_ids(rig: Golden, facts: Facts) -> list[str]:
    """Return the ids of all published advisories and events."""
    bodies = [
        json.loads(message.payload)
        for stream in facts["advisory_streams"]
        for message in rig.stored(stream)
        if message.payload.startswith(b"{")
    ]
    return sorted(body["event_id"] for body in bodies if "event_id" in body)


def work(rig: Golden, facts: Facts) -> tuple[Any, ...]:
    """Return what a run without new messages leaves as it is: copies, counters, advisories."""
    copied = {name: copies for name, copies in rig.copied().items() if name not in facts["advisory_streams"]}
    columns = "stream, seen_messages, copied_messages, skipped_messages, gap_messages, parked_messages"
    rows = rig.rows(f"SELECT {columns} FROM replication WHERE name = '{SITE}' ORDER BY ALL")
    return copied, [row for row in rows if row["stream"] in copied], event_ids(rig, facts)


def assert_exact(rig: Golden, facts: Facts) -> None:
    """Assert that each message to copy has one equal copy, and that the counters say so."""
    parked = rig.rows("SELECT stream, sequence FROM parked_messages")
    rows = {row["stream"]: row for row in rig.rows("replication") if row["name"] == SITE}
    copied = rig.copied()
    for entry in rig.settings().streams:
        name, after = entry.stream, rows[entry.stream]["next_sequence"]
        source = {message.sequence: message.payload for message in rig.stored(name)}
        # A run that has copied everything publishes its heartbeat.
        assert after > max(source) or name in facts["advisory_streams"], name
        if entry.tracked:
            stored = rig.rows(f"SELECT sequence FROM node_snapshot_history WHERE stream = '{name}'")
            history = [row["sequence"] for row in stored]
            assert len(history) == len({*history}), name
            # A parked message that was copied later may lack its row.
            assert {*history} | {*facts["resent"].get(name, ())} == {*copied[name]}, name
            new = sorted(source)[-len(facts["messages"].get(name, ())) :]
            expected = {*facts["copies"][name], *facts["queued"].get(name, ()), *facts["resent"].get(name, ()), *new}
        else:
            gone = {row["sequence"] for row in parked if row["stream"] == name}
            expected = {sequence for sequence in source if sequence < after} - gone
        assert sorted(copied[name]) == sorted(expected), name
        assert copied[name][: len(facts["copies"][name])] == facts["copies"][name], name
        assert rows[name]["copied_messages"] == len(expected), name
        copies = [copy.payload for copy in rig.copies(entry.target_stream)]
        assert copies == [source[sequence] for sequence in copied[name]], name


def assert_kept(rig: Golden, facts: Facts, later: str, kept: dict[str, tuple[str, ...]]) -> None:
    """Assert that rows stay, and that silence and new messages alone change the status of nodes."""
    sighted = {
        (stream, json.loads(body)["sender"])
        for stream, messages in facts["messages"].items()
        for _, _, body in messages
        if body.startswith("{")
    }
    before, tables = facts["tables"], rig.tables()
    nodes = keys(tables["node_availability"])
    for key, row in keys(before["node_availability"]).items():
        now, status = nodes[key], "up" if key in sighted else row["status"]
        assert now["first_seen"] == row["first_seen"], key
        assert (now["last_seen"] > row["last_seen"]) is (key in sighted), key
        steady = key[0] in facts["steady_streams"] and (key in sighted or later == MINUTES)
        assert now["status"] in ({status} if steady else SILENT[status]), key
    assert sighted <= {*nodes}
    newest = "SELECT name, stream, node, max(sequence) AS sequence FROM node_snapshot_history GROUP BY ALL ORDER BY ALL"
    assert rig.rows("SELECT name, stream, node, sequence FROM node_snapshots ORDER BY ALL") == rig.rows(newest)
    retired = keys(tables["retired_nodes"])
    for key, row in keys(before["retired_nodes"]).items():
        assert key in sighted or {name: retired[key][name] for name in row} == row, key
    for table, without in kept.items():
        rows = before[table]
        assert {*known(rows, rows, without)} <= {*known(tables[table], rows, without)}, table


def assert_ended(rig: Golden) -> None:
    """Assert that, after years, outages and flapping have ended."""
    for table, begin, end in (("node_events", "flapping", "settled"), ("site_events", "dark", "restored")):
        begun, ended = (rig.rows(f"SELECT stream FROM {table} WHERE event = '{event}'") for event in (begin, end))
        assert begun == ended, table


def undocumented(home: Path) -> list[str]:
    """Return the files of a home that the table of its files in the page on storage lacks."""
    guide = (Path(__file__).parents[1] / "docs" / "storage.md").read_text()
    table = guide.partition("| path | content | size |")[2].partition("\n\n")[0]
    rows = table.strip().splitlines()
    paths = [path for row in rows for path in re.findall("`([^`]+)`", row.split("|")[1])]
    known = [
        re.escape(path).replace("<name>", "[^/]+").replace("<pid>", "[0-9]+").replace("…", "[^/]+") for path in paths
    ]
    whole = re.compile("|".join(f"{path}.*" if path.endswith("/") else path for path in known))
    names = [str(file.relative_to(home)) for file in home.rglob("*") if file.is_file()]
    return [name for name in names if name != "replication.yaml" and not whole.fullmatch(name)]


def test_golden_home_is_read_and_continued(golden: tuple[Golden, str, ExitStack], command: Command) -> None:
    rig, later, servers = golden
    facts, home = rig.facts(), rig.home
    run = use(rig, home, command)
    # Without servers: the home has the last known values of the data source. A reader renews the views of an earlier version.
    nodes = json.loads(run("nodes", "--format", "json")[1])
    assert len(nodes) == len(facts["tables"]["last_seen_nodes"]) + len(facts["tables"]["retired_nodes"])
    tables = rig.tables()
    for name, rows in facts["tables"].items():
        without = REWRITTEN.get(name, ())
        assert known(tables[name], rows, without) == known(rows, rows, without), name
        assert len(tables[name]) == len(rows), name
    code, _, errors = run("export", str(rig.folder / "copies"), "--format", "parquet", "--tables", ",".join(ROWS))
    assert code == 0, errors
    for words in ("check", "summary", "availability"):
        code, out, errors = run(words)
        assert (code, bool(out)) == (0, True), (words, errors)
    windows = json.loads(run("maintenance", "list", "--format", "json")[1])
    assert [row["id"] for row in windows] == facts["windows"]
    servers.enter_context(rig.source)
    servers.enter_context(rig.target)
    # An unavailable source of data is asked again after a pause.
    rig.travel(minutes=1)
    lag = json.loads(run("lag", "--format", "json")[1])
    paused = {row["stream"] for row in facts["tables"]["replication"] if row["paused"]}
    assert {row["stream"] for row in lag if row["paused"]} == paused
    # From the store, before a run stores another one.
    assert "restored the checkpoint" in use(rig, rig.folder / "other", command)("restore", "--site", SITE)[1]

    run = use(rig, home, command)
    for arguments in facts["commands"]:
        assert run(*arguments)[0] == 0, arguments
    for server, stream, changes in facts["streams"]:
        where = rig.source if server == "source" else rig.target
        existing = rig.api(f"STREAM.INFO.{stream}", server=where).get("config")
        request = f"STREAM.UPDATE.{stream}" if existing else f"STREAM.CREATE.{stream}"
        assert "error" not in rig.api(request, {"name": stream, **(existing or {}), **changes}, where)
    rig.send(facts["messages"])
    # The rules of operators decide what the watermark has passed.
    rig.travel(minutes=1)
    rig.drain()
    # The centre has not run since the upgrade; its rows stay.
    assert len(rig.rows("global_availability")) == len(facts["tables"]["global_availability"]) > 0
    rig.drain(CENTRE)
    assert_exact(rig, facts)
    assert_kept(rig, facts, later, KEPT | KEPT_AT_HOME)
    if later == YEARS:
        assert_ended(rig)
    ids = event_ids(rig, facts)
    assert len(ids) == len(set(ids))
    assert {*facts["outbox"]} <= {*ids}
    announcing = ", ".join(f"'{entry.stream}'" for entry in rig.settings().streams if entry.advisory)
    announced = f"FROM node_advisories WHERE announced_at IS NOT NULL AND stream IN ({announcing})"
    assert {row["event_id"] for row in rig.rows(f"SELECT event_id {announced}")} <= {*ids}
    assert rig.rows(f"SELECT event_id {announced} AND published_at IS NULL") == []

    before = work(rig, facts)
    rig.drain()
    rig.drain(CENTRE)
    assert work(rig, facts) == before
    notify_once(rig.settings())
    notified = rig.notified()
    assert len({*notified, *facts["notified"]}) == len(notified) + len(facts["notified"])
    assert notified or later == MINUTES
    assert run("nodes")[0] == run("check")[0] == 0

    # The checkpoint is older than the target and the advisories.
    run = use(rig, rig.folder / "empty", command)
    for arguments in (["restore", "--site", SITE, str(rig.folder / "checkpoint")], *facts["commands"]):
        assert run(*arguments)[0] == 0, arguments
    rig.drain()
    assert work(rig, facts) == before
    assert_exact(rig, facts)
    assert_kept(rig, facts, later, KEPT)
    assert [undocumented(each) for each in (home, rig.folder / "other", rig.home)] == [[], [], []]
