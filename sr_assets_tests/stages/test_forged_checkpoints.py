"""Checkpoints that somebody without the right to lead writes: refused in one line, before they change anything."""

import asyncio
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.nats.object_store import ObjectBucket
from sr_assets.adapters.state import checkpoint
from sr_assets.adapters.state.checkpoint import (
    About,
    Stored,
    last_stored,
    read_about,
    restore_checkpoint,
    write_checkpoint,
)
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import RunError
from sr_assets.domain.subjects import object_subject
from sr_assets.stages.checkpointing import described, find_checkpoint, restore_site
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.operator_commands import save_site
from sr_assets.stages.standby_tables import show_checkpoint
from sr_assets_tests.examples import one_in
from sr_assets_tests.members import make_bucket, member
from sr_assets_tests.rig import SITE, Rig, address
from sr_assets_tests.stages.test_checkpointing import (
    TRACKED,
    add,
    change_about,
    drain,
    lose_home,
    numbered,
    numbers,
    state_rows,
)

KEY = "the members' secret of this test"
NAME = f"{SITE}/{SITE}"


def change_part(file: Path, name: str, content: bytes, **options: Any) -> None:
    """Replace a part of a checkpoint, or add one."""
    with zipfile.ZipFile(file) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for each, old in (parts | {name: content}).items():
            archive.writestr(each, old if each != name else content, **(options if each == name else {}))


def parquet(folder: Path, query: str) -> bytes:
    part = folder / "forged.parquet"
    duckdb.execute(f"COPY ({query}) TO '{part}' (FORMAT parquet)")
    return part.read_bytes()


def history_of(folder: Path, file: str, stream: str = "S") -> bytes:
    """Return the table of the history with a file that compaction has replaced."""
    return parquet(
        folder,
        f"SELECT '{stream}' AS stream, '{file}' AS file, 0::TINYINT AS level, true AS replaced, 1::BIGINT AS rows,"
        " 1::BIGINT AS first_hour, 1::BIGINT AS last_hour",
    )


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of a site without a server."""
    folder = tmp_path_factory.mktemp("genuine")
    with SiteState(folder) as state, state.read_snapshot():
        write_checkpoint(
            state.connection.raw,
            folder / "checkpoint",
            replicator=SITE,
            site=SITE,
            at_ns=1,
            identities={"S": (SITE, SITE)},
            paused=frozenset(),
        )
    return folder / "checkpoint"


@pytest.fixture
def forged(genuine: Path, tmp_path: Path) -> Path:
    file = tmp_path / "checkpoint"
    file.write_bytes(genuine.read_bytes())
    return file


def restore(file: Path, home: Path) -> None:
    """Restore a file as a run does; raises RunError if it is refused."""
    folder = home / "sites" / SITE
    folder.mkdir(parents=True, exist_ok=True)
    restore_checkpoint(file, read_about(file, SITE, SITE), folder, home)


def refusal(file: Path, home: Path) -> str:
    """Return why a checkpoint is refused, which is one line, and leaves no state."""
    with pytest.raises(RunError) as raised:
        restore(file, home)
    assert str(raised.value).isprintable()
    assert list((home / "sites" / SITE).glob("*")) == []
    return str(raised.value)


@pytest.mark.parametrize(
    "file", ("victim.parquet", "home/snapshots/name=LONDON/stream=S/date=2026-01-31/1-2-3-4.parquet")
)
def test_checkpoint_indexes_no_file_by_its_name(forged: Path, tmp_path: Path, file: str) -> None:
    """Not even a file of this home's history, which may have other rows."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    home = tmp_path / "home"
    change_part(forged, "history.parquet", history_of(tmp_path, os.path.relpath(tmp_path / file, home)))
    restore(forged, home)
    with duckdb.connect(str(home / "sites" / SITE / "state.duckdb")) as state:
        assert state.execute("SELECT count(*) FROM history").fetchone() == (0,)
    assert (tmp_path / file).exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", sorted(About.__dataclass_fields__))
@one_in(8)
@given(value=VALUES)
def test_any_origin_of_a_checkpoint_is_read_or_refused(genuine: Path, tmp_path: Path, name: str, value: object) -> None:
    file = tmp_path / "checkpoint"
    file.write_bytes(genuine.read_bytes())
    change_about(file, **{name: value})
    try:
        about = read_about(file, SITE, SITE)
    except RunError as error:
        problem = str(error)
    else:
        problem = ""
        assert {key: type(each) for key, each in asdict(about).items()} == {
            key: type(each) for key, each in asdict(read_about(genuine, SITE, SITE)).items()
        }
    assert problem.isprintable()


@one_in(8)
@given(at=st.integers(0, 1 << 20), junk=st.binary(max_size=8), cut=st.integers(0, 8), end=st.integers(0, 1 << 20))
def test_any_bytes_of_a_checkpoint_are_read_or_refused(
    genuine: Path, tmp_path: Path, at: int, junk: bytes, cut: int, end: int
) -> None:
    content, file = bytearray(genuine.read_bytes()), tmp_path / "checkpoint"
    at %= len(content)
    content[at : at + cut] = junk
    # Mostly whole, else cut off somewhere.
    file.write_bytes(content if end % 4 else content[: end % len(content)])
    try:
        read_about(file, SITE, SITE)
    except RunError as error:
        assert str(error).isprintable()  # noqa: PT017
        assert len(str(error)) < 500 + len(str(file))  # noqa: PT017


def test_checkpoint_without_an_identity_is_refused(forged: Path, tmp_path: Path) -> None:
    row = "SELECT NULL::BIGINT AS place, 'S' AS stream, 'n' AS node, 'new' AS event, 1::BIGINT AS event_ns"
    zeros = ", ".join(f"0::BIGINT AS {name}_ns" for name in ("seen", "detected", "published"))
    change_part(forged, "transitions.parquet", parquet(tmp_path, f"{row}, NULL::VARCHAR AS event_id, {zeros}"))
    change_about(forged, identities={}, computed=[])
    assert "cannot be restored" in refusal(forged, tmp_path / "home")


@pytest.mark.parametrize(
    "fields",
    (
        {"maintenance": [{"id": "\ud800", "globs": []}]},
        {"maintenance": [{"id": "a", "globs": ["\ud800*"], "reason": "all"}]},
        {"paused": ["\ud800"]},
    ),
)
def test_checkpoint_with_text_that_no_table_holds_is_refused(
    forged: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    change_about(forged, **fields)
    assert "has a wrong type or value" in refusal(forged, tmp_path / "home")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    (
        ("state.duckdb", b"x", "is not a part of one"),
        ("../escape", b"x", "is not a part of one"),
        ("about.json", b"[" * 100_000, "is not a complete checkpoint"),
        ("about.json", b" " * (9 << 20), "is too large"),
        ("nodes.parquet", b"no Parquet", "cannot be restored"),
    ),
)
def test_checkpoint_with_a_foreign_part_is_refused(
    forged: Path, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    change_part(forged, name, content)
    assert problem in refusal(forged, tmp_path / "home")


def test_compressed_part_of_a_checkpoint_is_refused(forged: Path, tmp_path: Path) -> None:
    change_part(forged, "nodes.parquet", bytes(1 << 20), compress_type=zipfile.ZIP_DEFLATED)
    assert "is too large" in refusal(forged, tmp_path / "home")


@pytest.mark.parametrize(
    ("query", "problem"),
    (
        ("SELECT 'S' AS stream, 1::BIGINT AS first_sequence FROM range(2001)", "more than 1,000 rows"),
        ("SELECT repeat('x', 1000) AS stream FROM range(1000)", "of text and lists"),
        ("SELECT 'S' AS stream, range(1000) AS first_sequence FROM range(1000)", "of text and lists"),
        ("SELECT {'a': 1} AS stream", "has columns that no table has"),
    ),
)
def test_checkpoint_with_huge_rows_is_refused(
    forged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, problem: str
) -> None:
    monkeypatch.setattr(checkpoint, "_MOST_ROWS", 1_000)
    monkeypatch.setattr(checkpoint, "_MOST_BYTES", 900_000)
    change_part(forged, "gaps.parquet", parquet(tmp_path, query))
    assert problem in refusal(forged, tmp_path / "home")


def test_small_checkpoint_with_many_equal_rows_is_refused(forged: Path, tmp_path: Path) -> None:
    change_part(forged, "gaps.parquet", parquet(tmp_path, "SELECT 'S' AS stream FROM range(1_000_000)"))
    assert forged.stat().st_size < 100_000
    assert "gaps.parquet has more than" in refusal(forged, tmp_path / "home")


@pytest.mark.parametrize("number", (2**63 - 1, 2**62 + 1, -(2**62) - 1))
def test_checkpoint_with_an_impossible_number_is_refused(forged: Path, tmp_path: Path, number: int) -> None:
    change_part(forged, "commits.parquet", parquet(tmp_path, f"SELECT 1::BIGINT AS number UNION ALL SELECT {number}"))
    assert "commits.parquet has an impossible number in number" in refusal(forged, tmp_path / "home")


@pytest.mark.process
@pytest.mark.parametrize(
    "column",
    (
        "target_adopted",
        pytest.param("target_checked", marks=pytest.mark.nightly),
        pytest.param("lost_messages", marks=pytest.mark.nightly),
    ),
)
def test_state_with_a_forged_number_stops_no_run(rig: Rig, column: str) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    with rig.open() as site, site.state.transaction():
        site.state.connection.execute(f"UPDATE copying SET {column} = ?", [2**62])
    for n in (4, 5):
        rig.publish(stream, numbered(n, n + 1))
        rig.drain()
    assert numbers(rig, stream) == [1, 2, 3, 4, 5]


@pytest.mark.process
def test_replaced_file_outside_the_history_is_not_deleted(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    rig.drain()
    victim = tmp_path / "victim.parquet"
    victim.touch()
    with rig.open() as site, site.state.transaction():
        site.state.connection.execute(
            "INSERT INTO history VALUES (?, ?, 0, true, 1, 1, 1), (?, ?, 0, true, 1, 1, 1)",
            [stream, str(victim), stream, str(tmp_path)],
        )
    for _ in range(2):
        rig.publish(stream, numbered(9, 12))
        rig.drain()
    assert victim.exists()
    assert not [row for row in state_rows(rig)["history"] if row[1] == str(victim)]
    assert len([record for record in caplog.records if "was not deleted" in record.message]) == 2


def put(rig: Rig, bucket: str, file: Path, description: dict[str, Any], name: str = NAME) -> None:
    """Store an object as any client may."""
    with ObjectBucket(address(rig.source), bucket) as opened:
        opened.put(name, file, description)


@pytest.mark.process
def test_key_refuses_checkpoints_of_others(rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unsigned, of another key or site, of another time, with other content, and replayed."""
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 20))
    bucket = rig.unique("STATE")
    store: dict[str, Any] = {"checkpoint": {"interval": "1s", "bucket": bucket, "key": KEY}}
    rig.drain(**store)
    configured, fetched = rig.settings(**store), tmp_path / "fetched"
    with ObjectBucket(address(rig.source), bucket) as opened:
        old = opened.get(NAME, fetched)
    assert old is not None
    assert KEY not in json.dumps(old.description)
    assert KEY.encode() not in fetched.read_bytes()
    unsigned = tmp_path / "unsigned"
    save_site(rig.settings(), SITE, unsigned)
    later = {
        **old.description,
        "at_ns": old.description["at_ns"] + 10**12,
        "commit": old.description["commit"] + 10**12,
    }
    rig.publish(stream, numbered(20, 40))
    rig.drain(**store)
    newest = last_stored(rig.home / "sites" / SITE)
    assert newest is not None
    forgeries: dict[str, tuple[Path, dict[str, Any], str]] = {
        "unsigned": (unsigned, newest._asdict(), "has no signature"),
        "later": (fetched, later, "has no signature"),
        "other content": (unsigned, old.description, "earlier checkpoint"),
        "replayed": (fetched, old.description, "earlier checkpoint"),
    }
    for file, description, problem in forgeries.values():
        put(rig, bucket, file, description)
        with pytest.raises(RunError, match=problem) as raised:
            find_checkpoint(configured, SITE)
        assert "\n" not in str(raised.value)
        before = state_rows(rig)
        with pytest.raises(RunError, match=problem):
            restore_site(configured, SITE, None)
        assert state_rows(rig) == before
    # An empty home does not know the later one; content that was not signed is refused anyway.
    lose_home(rig)
    put(rig, bucket, unsigned, old.description)
    with pytest.raises(RunError, match="is not the signed one"):
        restore_site(configured, SITE, None)
    with pytest.raises(RunError, match="has no signature"):
        restore_site(configured, SITE, unsigned)
    rig.run(**store)
    assert any("no checkpoint was restored" in record.message for record in caplog.records)
    # The operator knows who wrote the file.
    assert "restored the checkpoint" in restore_site(configured, SITE, unsigned, unsigned=True)
    assert "restored the checkpoint" in restore_site(configured, SITE, None, unsigned=True)


@pytest.mark.process
def test_signed_checkpoint_outlives_forgeries(rig: Rig, tmp_path: Path) -> None:
    """A member with a state replaces a forgery that claims a later time; an empty home restores the signed one."""
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 20))
    bucket, text = rig.unique("STATE"), tmp_path / "text"
    text.write_text("no checkpoint")
    store: dict[str, Any] = {"checkpoint": {"interval": "1s", "bucket": bucket, "key": KEY}}
    rig.drain(**store)
    put(rig, bucket, text, {"at_ns": 2**62, "commit": 2**62, "positions": {}})
    rig.publish(stream, numbered(20, 30))
    rig.drain(**store)
    copied = numbers(rig, stream)
    lose_home(rig)
    rig.publish(stream, numbered(35, 36))
    rig.drain(**store)
    assert numbers(rig, stream) == [*copied, 35]
    # Signed for this site alone.
    saved = tmp_path / "saved"
    save_site(rig.settings(**store), SITE, saved)
    with pytest.raises(RunError, match="has no signature"):
        restore_site(rig.settings(checkpoint={"key": "another secret of the same length"}), SITE, saved)
    restore_site(rig.settings(**store), SITE, saved)


@pytest.mark.process
def test_empty_home_does_not_replace_an_unsigned_checkpoint(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The members get a key, and a pod begins with an empty home: the earlier checkpoint must stay."""
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    store: dict[str, Any] = {"checkpoint": {"interval": "1s", "bucket": rig.unique("STATE")}}
    rig.drain(**store)
    stored = find_checkpoint(rig.settings(**store), SITE)
    lose_home(rig)
    signed: dict[str, Any] = {"checkpoint": store["checkpoint"] | {"key": KEY}}
    rig.run(**signed)
    assert any("sr-assets restore --unsigned" in record.message for record in caplog.records)
    assert find_checkpoint(rig.settings(**store), SITE) == stored
    lose_home(rig)
    restore_site(rig.settings(**signed), SITE, None, unsigned=True)
    rig.publish(stream, numbered(9, 10))
    rig.drain(**signed)
    assert numbers(rig, stream) == list(range(1, 10))


@pytest.mark.process
def test_unsigned_restore_names_who_may_write(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    store: dict[str, Any] = {"checkpoint": {"interval": "1s", "bucket": rig.unique("STATE")}}
    rig.drain(**store)
    lose_home(rig)
    rig.publish(stream, numbered(9, 10))
    rig.drain(**store)
    assert numbers(rig, stream) == list(range(1, 10))
    (warning,) = [record.message for record in caplog.records if "unsigned" in record.message]
    assert object_subject(store["checkpoint"]["bucket"], NAME) in warning
    assert rig.source.address in warning


@pytest.mark.process
def test_follower_shows_no_unsigned_checkpoint(rig: Rig, tmp_path: Path) -> None:
    name, feed = rig.make(), rig.make("FEED", duplicate_window=100_000_000)
    rig.create(name, rig.target, duplicate_window=100_000_000)
    rig.add(name, **TRACKED, advisory={"subject": f"{feed}.%s.%v", "reliable": True})
    rig.publish(name, numbered(1, 9))
    bucket = make_bucket(rig)
    leader, follower = member(rig, tmp_path, "a", bucket), member(rig, tmp_path, "b", bucket)
    assert leader.checkpoint is not None
    keyed: dict[str, Any] = {"checkpoint": leader.checkpoint.changed(key=KEY)}
    with Leadership(leader, SITE) as leadership:
        leadership.require()
        drain(leader)
        with Leadership(follower, SITE):
            with pytest.raises(RunError, match="has no signature"):
                show_checkpoint(follower.changed(**keyed), SITE)
            assert not (follower.home / "fleet.duckdb").exists()
            rig.publish(name, numbered(9, 12))
            drain(leader.changed(**keyed))
            assert show_checkpoint(follower.changed(**keyed), SITE)


INFOS: tuple[Callable[[str], dict[str, Any]], ...] = (
    lambda _: {"nuid": ">", "size": 3},
    lambda _: {"nuid": "*", "size": 3},
    lambda nuid: {"nuid": nuid, "size": 1 << 60},
    lambda nuid: {"nuid": nuid, "size": 3, "digest": "SHA-256=AAAA"},
    lambda _: {"nuid": ["x"], "size": "3"},
    lambda _: {"options": {"link": {"bucket": "OTHER", "name": "x"}}, "nuid": "x"},
    lambda nuid: {"nuid": nuid, "size": 3, "description": "[" * 100_000},
)


@pytest.mark.process
@pytest.mark.parametrize("forge", INFOS, ids=("all", "any", "size", "digest", "types", "link", "nested"))
def test_forged_object_reaches_no_other_object(rig: Rig, tmp_path: Path, forge: Any) -> None:
    bucket, file = rig.unique("STATE"), tmp_path / "file"
    file.write_bytes(b"genuine")
    put(rig, bucket, file, {}, "R/other")
    put(rig, bucket, file, {}, NAME)

    def nuid() -> str:
        (message,) = [each for each in rig.stored(f"OBJ_{bucket}") if each.subject == object_subject(bucket, NAME)]
        return str(json.loads(message.payload)["nuid"])

    forged = json.dumps({"name": NAME, "bucket": bucket, "chunks": 1, **forge(nuid())}).encode()
    asyncio.run(_publish(rig, object_subject(bucket, NAME), forged))
    with ObjectBucket(address(rig.source), bucket) as opened_bucket:
        with pytest.raises(RunError):
            opened_bucket.get(NAME, tmp_path / "read")
        # The next checkpoint replaces it, and deletes the chunks of no other object.
        opened_bucket.put(NAME, file, {})
        for name in (NAME, "R/other"):
            assert opened_bucket.get(name, tmp_path / "read") is not None
            assert (tmp_path / "read").read_bytes() == b"genuine"


@given(st.dictionaries(st.text(), st.integers(0, 2**63 - 1), max_size=8), st.integers(0, 5_000))
@one_in(4)
def test_positions_of_a_checkpoint_are_one_short_line(positions: dict[str, int], more: int) -> None:
    positions = {f"\x1b[2J{n}": n for n in range(more)} | positions
    line = described(Stored(1, positions))
    assert line.isprintable()
    assert len(line) < 3_000
    assert (f"and {len(positions) - 3:,} more)" in line) == (len(positions) > 3)


@pytest.mark.process
@pytest.mark.parametrize("chunks", (0, 1))
def test_object_without_all_of_its_chunks_is_refused(rig: Rig, tmp_path: Path, chunks: int) -> None:
    bucket, file = rig.unique("STATE"), tmp_path / "file"
    file.write_bytes(b"genuine")
    put(rig, bucket, file, {}, NAME)
    for _ in range(chunks):
        asyncio.run(_publish(rig, f"$O.{bucket}.C.forged", b"half"))
    forged = json.dumps({"name": NAME, "bucket": bucket, "nuid": "forged", "size": 8, "chunks": 2}).encode()
    asyncio.run(_publish(rig, object_subject(bucket, NAME), forged))
    with ObjectBucket(address(rig.source), bucket) as opened_bucket:
        with pytest.raises(RunError, match=f"{NAME}: lacks {8 - 4 * chunks} of its 8 bytes; store another checkpoint"):
            opened_bucket.get(NAME, tmp_path / "read")
        opened_bucket.put(NAME, file, {})
        assert opened_bucket.get(NAME, tmp_path / "read") is not None


@pytest.mark.process
def test_unsigned_checkpoint_is_refused_before_its_content_is_read(rig: Rig, tmp_path: Path) -> None:
    add(rig)
    bucket, file = rig.unique("STATE"), tmp_path / "file"
    file.write_bytes(b"genuine")
    put(rig, bucket, file, {}, NAME)
    described_as = json.dumps({"at_ns": 1, "positions": {}, "commit": 1, "sha256": "", "hmac": ""})
    # Whoever reads the content finds no chunk of it.
    forged = {
        "name": NAME,
        "bucket": bucket,
        "nuid": "forged",
        "size": 1 << 30,
        "chunks": 1,
        "description": described_as,
    }
    asyncio.run(_publish(rig, object_subject(bucket, NAME), json.dumps(forged).encode()))
    with pytest.raises(RunError, match="has no signature"):
        restore_site(rig.settings(checkpoint={"bucket": bucket, "key": KEY}), SITE, None)


async def _publish(rig: Rig, subject: str, payload: bytes) -> None:
    client = await nats.connect(rig.source.url)
    try:
        await client.jetstream().publish(subject, payload, headers={"Nats-Rollup": "sub"})
    finally:
        await client.close()
