"""The newest message of each node, for any payload, and its Parquet history."""

import base64
import gzip
import json
from typing import Any

import pytest
from pyarrow import parquet

from sr_assets.adapters.state.snapshot_index import SnapshotIndex
from sr_assets.adapters.state.stream_tables import COPYING, Counter
from sr_assets.domain import history_layout
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.tracking.node_snapshots import SnapshotStage
from sr_assets_tests.rig import SITE, Rig, Sent

SAMPLED = {"inspect_subject_token": 2, "inspect_duration": "10m", "size_trigger": 1}
#: Text that Python parses as JSON, or almost, but not every JSON parser accepts.
ODD_PAYLOADS = (
    b'{"a": "\\ud800"}',
    b'{"a": 1e999, "b": -1e999}',
    b'{"a": NaN}',
    b'{"a": 1, "a": 2}',
    b'{"a": "\\u0000"}',
    b'{"a": 123456789012345678901234567890.5}',
    b"[" * 900 + b"]" * 900,
    b"[" * 100_000,
    b"7",
    b'"text"',
    b"null",
    b"  \n",
    b"",
    b"\xef\xbb\xbf{}",
    b"\xff\x00\xfe",
    b"{'a': 1}",
    b"-0",
    b'{"a": .5}',
)


def compact(site: Site, now_ns: int) -> None:
    """Compact the history of the site's only stream, as at the end of a run."""
    (stream,) = site.streams
    SnapshotStage(stream, site.state, site, StreamReport(stream)).compact(now_ns)


def registration(content: dict[str, object]) -> bytes:
    zipped = base64.b64encode(gzip.compress(json.dumps(content).encode())).decode()
    content_message = {"protocol": "choria:registration:inventorycontent:1", "zcontent": zipped}
    outer = {"protocol": "choria:adapters:natsstream:output:1", "sender": "x", "time": "2026-01-01T00:00:00Z"}
    return json.dumps({**outer, "data": json.dumps(content_message)}).encode()


def test_any_payload_can_be_queried(rig: Rig) -> None:
    stream = rig.make()
    payloads = [*ODD_PAYLOADS, registration({"facts": {"os": "größe"}})]
    rig.publish(stream, [Sent(payload, f"n{n:02}") for n, payload in enumerate(payloads)])
    rig.add(stream, **SAMPLED)
    rig.drain()
    rows = rig.rows("SELECT * FROM node_snapshots ORDER BY node")
    assert [row["node"] for row in rows] == [f"n{n:02}" for n in range(len(payloads))]
    stored = rig.stored(stream)
    for row, message in zip(rows, stored, strict=True):
        assert (row["name"], row["stream"], row["sequence"]) == (SITE, stream, message.sequence)
        assert (row["subject"], row["payload_bytes"]) == (message.subject, len(message.payload))
        assert int(row["stored_at"].timestamp() * 1000) == message.stored_ns // 1_000_000
        assert (row["payload"] is None) != (row["payload_raw"] is None)
        assert (row["payload_raw"] if row["payload"] is None else row["payload"].encode()) == message.payload
    assert [row["metadata"] is None for row in rows] == [True] * len(ODD_PAYLOADS) + [False]
    assert json.loads(rows[-1]["metadata"])["facts"] == {"os": "größe"}
    assert rig.row("SELECT payload->>'a' AS a FROM node_snapshots WHERE node = 'n03'")["a"] in ("1", "2")


def test_registration_larger_than_the_limit_has_no_metadata(rig: Rig) -> None:
    stream = rig.make()
    small, bomb = registration({"a": 1}), registration({"a": "x" * 900_000})
    rig.publish(stream, [Sent(small, "n1"), Sent(bomb, "n2"), Sent(registration({"a": list(range(1_000))}), "n3")])
    rig.add(stream, **SAMPLED, max_metadata="1 KiB")
    rig.drain()
    rows = rig.rows("SELECT metadata FROM node_snapshots ORDER BY node")
    assert [row["metadata"] for row in rows] == ['{"a": 1}', None, None]
    with rig.open() as site:
        assert site.state.counters(stream).totals()[Counter.REFUSED_METADATA] == {COPYING: 2.0}


def test_published_mode_opens_only_the_published_files(rig: Rig) -> None:
    def others() -> dict[str, int]:
        paths = (path for path in rig.home.rglob("*") if path.name != "replication.yaml")
        modes = {str(path.relative_to(rig.home)): path.stat().st_mode & 0o777 for path in paths}
        return {name: mode for name, mode in modes.items() if mode & 0o077}

    stream = rig.make()
    rig.add(stream, **SAMPLED)
    rig.publish(stream, [Sent(b"{}", "n1")])
    rig.drain()
    assert not others()
    rig.publish(stream, [Sent(b"{}", "n2")])
    rig.drain(published_mode="0640")
    assert len([name for name in others() if name.startswith("snapshots") and name.endswith(".parquet")]) == 2
    folders = [rig.home / name for name in ("published", "snapshots", "availability", "inventory", "actions")]
    viewed = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    expected = {str(path.relative_to(rig.home)): 0o750 if path.is_dir() else 0o640 for path in viewed}
    assert others() == {"fleet.duckdb": 0o640, "tables.json": 0o640, **expected}
    assert rig.home.stat().st_mode & 0o777 == 0o710
    rig.drain()
    assert not others()


def test_snapshots_show_the_newest_message_and_history_has_all(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=4, **SAMPLED)
    rig.publish(stream, [Sent(b"x" * n, f"n{n % 3}") for n in range(1, 11)])
    rig.drain()
    rig.publish(stream, [Sent(b"y", "n1")])
    rig.drain()
    newest = rig.rows("SELECT node, sequence, payload_raw FROM node_snapshots ORDER BY node")
    assert [tuple(row.values()) for row in newest] == [("n0", 9, b"x" * 9), ("n1", 11, b"y"), ("n2", 8, b"x" * 8)]
    files = sorted((rig.home / "snapshots" / f"name={SITE}" / f"stream={stream}").glob("date=*/*.parquet"))
    sequences = [row for file in files for row in parquet.read_table(file, partitioning=None)["sequence"].to_pylist()]
    assert sorted(sequences) == list(range(1, 12))
    assert not list((rig.home / "sites" / SITE / "staging").rglob("*.parquet"))


def test_history_view_has_the_columns_of_the_snapshot_view(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, name="A1%b=c", batch_messages=2, **SAMPLED)
    rig.publish(stream, [*(Sent(b'{"n": %d}' % (10**n), "web1") for n in range(5)), Sent(b"\xff", "web2")])
    rig.drain("A1%b=c")
    columns = rig.rows("SELECT column_name, column_type FROM (DESCRIBE node_snapshots)")
    history = rig.rows("SELECT column_name, column_type FROM (DESCRIBE node_snapshot_history)")
    assert history == [*columns, {"column_name": "date", "column_type": "DATE"}]
    rows = rig.rows(
        "SELECT name, stream, sequence, CAST(payload->>'n' AS INTEGER) AS n FROM node_snapshot_history"
        " WHERE node = 'web1' ORDER BY stored_at"
    )
    assert [tuple(row.values()) for row in rows] == [("A1%b=c", stream, n + 1, 10**n) for n in range(5)]
    newest = rig.rows("SELECT * FROM node_snapshots ORDER BY node")
    assert newest == rig.rows(
        "SELECT * EXCLUDE (date) FROM node_snapshot_history WHERE sequence IN (5, 6) ORDER BY node"
    )


def test_staged_files_are_indexed_by_the_next_run(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, **SAMPLED)
    rig.publish(stream, [Sent(b"1", "a"), Sent(b"22", "b")])
    rig.run(stages=[Stage.NODE_STATE, Stage.REPLICA])
    assert not rig.rows("node_snapshots")
    rig.publish(stream, [Sent(b"333", "a")])
    rig.run(stages=[Stage.NODE_STATE, Stage.REPLICA])
    rig.run(stages=[Stage.NODE_SNAPSHOTS])
    assert [row["sequence"] for row in rig.rows("SELECT * FROM node_snapshots ORDER BY node")] == [3, 2]


def test_untracked_messages_have_no_snapshots(rig: Rig) -> None:
    stream, plain = rig.make(), rig.make()
    rig.add(stream, inspect_subject_token=3, inspect_duration="10m")
    rig.add(plain)
    for source in (stream, plain):
        rig.publish(source, [Sent(b"1", "a")])
    rig.drain()
    assert not rig.rows("node_snapshots")
    assert [len(rig.copies(name)) for name in (stream, plain)] == [1, 1]


def test_compaction_of_a_closed_day_keeps_files_of_open_readers(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=1, **SAMPLED)
    rig.publish(stream, [Sent(b"x" * n, "n") for n in range(1, 4)])
    rig.drain()
    folder = rig.home / "snapshots" / f"name={SITE}" / f"stream={stream}"
    (day,) = folder.glob("date=*")
    assert len(list(day.glob("*.parquet"))) == 3
    before = rig.row("SELECT node, sequence, payload_raw FROM node_snapshots")
    with rig.open() as site:
        tomorrow_ns = rig.stored(stream)[-1].stored_ns + 86_400 * 10**9
        compact(site, tomorrow_ns)
        # The published view still refers to the old files.
        assert rig.row("SELECT node, sequence, payload_raw FROM node_snapshots") == before
        site.publish()
        assert rig.row("SELECT node, sequence, payload_raw FROM node_snapshots") == before
        compact(site, tomorrow_ns)
    assert [file.name for file in day.glob("*.parquet")] == ["1-4.parquet"]
    assert rig.row("SELECT node, sequence, payload_raw FROM node_snapshots") == before


def test_current_day_stays_compact_after_an_interrupted_merge(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_layout, "_FILES", 3)
    stream = rig.make()
    rig.add(stream, batch_messages=1, **SAMPLED)
    rig.publish(stream, [Sent(b"x" * n, f"n{n % 2}") for n in range(1, 8)])

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotIndex, "move", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    folder = rig.home / "snapshots" / f"name={SITE}" / f"stream={stream}"
    (day,) = folder.glob("date=*")
    assert len(list(day.glob("*.parquet"))) > 3
    for number in (8, 9):
        rig.publish(stream, [Sent(b"x" * number, f"n{number % 2}")])
        rig.drain()
        newest = rig.rows("SELECT sequence, payload_raw FROM node_snapshots ORDER BY sequence")
        assert [(row["sequence"], len(row["payload_raw"])) for row in newest] == [(n, n) for n in (number - 1, number)]
        history = rig.rows("SELECT sequence FROM node_snapshot_history ORDER BY sequence")
        assert [row["sequence"] for row in history] == list(range(1, number + 1))
    assert len(list(day.glob("*.parquet"))) <= 5
    rows = [parquet.read_table(file, partitioning=None)["sequence"].to_pylist() for file in day.glob("*.parquet")]
    assert sorted(sequence for file_rows in rows for sequence in file_rows) == list(range(1, 10))


def test_days_past_retention_are_deleted_with_their_snapshots(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, **SAMPLED)
    rig.publish(stream, [Sent(b"x", "n")])
    retention: dict[str, Any] = {"snapshots": {"retention": "2d"}}
    rig.drain(**retention)
    with rig.open(**retention) as site:
        later_ns = rig.stored(stream)[-1].stored_ns + 4 * 86_400 * 10**9
        compact(site, later_ns)
        site.publish()
    assert not list((rig.home / "snapshots").rglob("*.parquet"))
    assert not rig.rows("node_snapshots")
    assert len(rig.rows("last_seen_nodes")) == 1


def test_history_of_an_untracked_stream_expires_by_retention(rig: Rig) -> None:
    stream = rig.make()
    entry = rig.add(stream, **SAMPLED)
    rig.publish(stream, [Sent(b"{}", "web1"), Sent(b"{}", "web2")])
    rig.drain()
    (day,) = (rig.home / "snapshots").glob("*/*/date=*")
    day.rename(day.with_name("date=2020-01-01"))
    with rig.open() as site:
        site.state.connection.execute(
            "UPDATE snapshots SET file = regexp_replace(file, 'date=[^/]*', 'date=2020-01-01')"
        )
    for key in SAMPLED:
        del entry[key]
    rig.drain(snapshots={"retention": "36500d"})
    assert len(rig.rows("node_snapshots")) == 2
    rig.drain()
    assert rig.rows("node_snapshots") == []
    assert not list((rig.home / "snapshots").rglob("*.parquet"))
