"""A state that an earlier version left, also amid a batch: this version goes on exactly where that one stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.state.schema import SCHEMA_VERSION
from sr_assets.stages.replication.batch import Batch
from sr_assets_tests.rig import SITE, Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h"}
_COUNTERS = ", ".join(
    f"{name} BIGINT DEFAULT 0"
    for name in (
        "seen_messages",
        "copied_messages",
        "copied_bytes",
        "skipped_messages",
        "too_old_messages",
        "no_sender_messages",
        "gap_messages",
        "parked_messages",
        "late_sightings",
    )
)
#: The tables as the versions before this one made them; reading and copying were one, with one intent.
_BOTH = """
CREATE TABLE about (schema_version INTEGER);
CREATE TABLE nodes (
    stream VARCHAR, node VARCHAR, first_seen_ns BIGINT, seen_ns BIGINT, sequence BIGINT, copied_ns BIGINT,
    copied_bytes BIGINT, status VARCHAR, status_since_ns BIGINT, retired_at_ns BIGINT, times_retired BIGINT,
    transition BIGINT, deadline_ns BIGINT);
CREATE TABLE transitions (
    event_id VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, detected_ns BIGINT, seen_ns BIGINT,
    age_ns BIGINT, sequence BIGINT, previous VARCHAR, transition BIGINT, late BOOLEAN, returned BOOLEAN,
    outage_ns BIGINT, published_ns BIGINT, outbox BOOLEAN);
CREATE TABLE gaps (
    stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR, noticed_ns BIGINT);
CREATE TABLE parked (
    stream VARCHAR, sequence BIGINT, stored_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    parked_ns BIGINT);
CREATE TABLE snapshots (stream VARCHAR, node VARCHAR, sequence BIGINT, file VARCHAR);
CREATE TABLE staged (stream VARCHAR, first BIGINT, next BIGINT);
"""
_SCHEMAS = {
    1: f"""
CREATE TABLE streams (
    stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, watermark_ns BIGINT, planned_ns BIGINT,
    last_stored_ns BIGINT, source_last_sequence BIGINT, lag_messages BIGINT, lag_ns BIGINT, target_created_ns BIGINT,
    target_sequence BIGINT, target_holds BIGINT, started VARCHAR, starts BIGINT,
    {_COUNTERS}, last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT);
CREATE TABLE intents (
    stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT, created_ns BIGINT,
    target_created_ns BIGINT, target_sequence BIGINT);
{_BOTH}
""",
    2: f"""
CREATE TABLE streams (
    stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, watermark_ns BIGINT, planned_ns BIGINT,
    last_stored_ns BIGINT, source_last_sequence BIGINT, lag_messages BIGINT, lag_ns BIGINT, target_created_ns BIGINT,
    target_sequence BIGINT, target_holds BIGINT, target_checked BIGINT, progress_ns BIGINT,
    alive_ns BIGINT, alive_due_ns BIGINT, started VARCHAR, starts BIGINT,
    {_COUNTERS}, last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT);
CREATE TABLE intents (
    stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT, created_ns BIGINT,
    target_created_ns BIGINT, target_sequence BIGINT, resend BOOLEAN, waits BOOLEAN);
{_BOTH}
CREATE TABLE copies (
    stream VARCHAR, committed_ns BIGINT, target_sequences BIGINT[], sequences BIGINT[], lengths BIGINT[]);
CREATE TABLE resends (stream VARCHAR, first BIGINT, next BIGINT, stood BOOLEAN);
CREATE TABLE global_nodes (
    feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, transition BIGINT, event_ns BIGINT,
    cycle TINYINT, seen_ns BIGINT, origin VARCHAR, received_ns BIGINT);
CREATE TABLE global_history (
    feed VARCHAR, event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, cycle TINYINT,
    event_ns BIGINT, received_ns BIGINT, seen_ns BIGINT, age_seconds DOUBLE, previous VARCHAR, transition BIGINT,
    late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, origin VARCHAR);
CREATE TABLE global_sites (
    feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, advised_ns BIGINT, observed_ns BIGINT,
    next_within_ns BIGINT, watermark_ns BIGINT, position BIGINT, lag_messages BIGINT, nodes BIGINT);
CREATE TABLE global_rejects (
    feed VARCHAR, sequence BIGINT, received_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    field VARCHAR, excerpt VARCHAR);
""",
}


def messages(first: int, after: int) -> list[Sent]:
    """Messages of senders who come twice each: the first is due."""
    return [Sent(json.dumps({"sender": f"n{n // 2}", "n": n}).encode()) for n in range(first, after)]


def write_earlier(file: Path, version: int, before: Path, intents: Path | None) -> None:
    """Write the state `before` as an earlier version kept it, with the intent that another one has open."""
    file.unlink()
    with duckdb.connect(str(file)) as earlier:
        earlier.execute(_SCHEMAS[version])
        earlier.execute("INSERT INTO about VALUES (?)", [version])
        earlier.execute(f"ATTACH '{before}' AS before (READ_ONLY)")
        earlier.execute(
            "CREATE TEMP TABLE joined AS SELECT * EXCLUDE (copying.stream, copying.created_ns, copying.starts)"
            " FROM before.streams JOIN before.copying ON streams.stream = copying.stream"
        )
        _insert(earlier, "streams", "joined")
        for table in ("nodes", "transitions", "gaps", "parked", "snapshots", "staged", *(("copies",) * (version > 1))):
            _insert(earlier, table, f"before.{table}")
        if intents is not None:
            earlier.execute(f"ATTACH '{intents}' AS crashed (READ_ONLY)")
            _insert(earlier, "intents", "crashed.intents")


def _insert(earlier: duckdb.DuckDBPyConnection, table: str, origin: str) -> None:
    names = [row[0] for row in earlier.execute(f"DESCRIBE {table}").fetchall()]
    earlier.execute(f"INSERT INTO {table} SELECT {', '.join(names)} FROM {origin}")


@pytest.mark.parametrize("under_way", (True, False))
@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
@pytest.mark.parametrize("version", tuple(_SCHEMAS))
def test_a_state_of_an_earlier_version_goes_on_without_a_loss_or_a_double(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, entry: dict[str, Any], under_way: bool
) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=20, **entry)
    rig.publish(stream, messages(0, 10))
    rig.drain()
    state, before, crashed = rig.home / "sites" / SITE / "state.duckdb", tmp_path / "before", tmp_path / "crashed"
    shutil.copyfile(state, before)
    rig.publish(stream, messages(10, 30))
    if under_way:

        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Batch, "_note_copies", crash)
            with pytest.raises(KeyboardInterrupt):
                rig.run()
        shutil.copyfile(state, crashed)
    step = 2 if entry else 1
    published = [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]
    assert published == list(range(0, 30 if under_way else 10, step))
    rig.publish(stream, messages(30, 60))
    write_earlier(state, version, before, crashed if under_way else None)
    rig.drain()
    assert [json.loads(copy.payload)["n"] for copy in rig.copies(stream)] == list(range(0, 60, step))
    row = rig.row("replication")
    assert (row["next_sequence"], row["seen_messages"], row["copied_messages"]) == (61, 60, 60 // step)
    assert (row["skipped_messages"], row["queued_messages"]) == (60 - 60 // step, 0)
    assert not rig.rows("gaps")
    if entry:
        assert len(rig.rows("node_snapshots")) == len(rig.rows("node_availability")) == 30
        assert rig.row("SELECT count(*) AS n FROM node_advisories WHERE event = 'new'")["n"] == 30
    with duckdb.connect(str(state), read_only=True) as opened:
        assert opened.execute("SELECT schema_version FROM about").fetchall() == [(SCHEMA_VERSION,)]
