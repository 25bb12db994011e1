"""Checkpoints of a site in an object store and in files: exact, refused if unusable, and never in the way of a run."""

import errno
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.adapters import control
from sr_assets.adapters.nats.object_store import ObjectBucket
from sr_assets.adapters.private import own_folder
from sr_assets.adapters.published.queries import node_states
from sr_assets.adapters.state.checkpoint import Stored, last_stored, write_checkpoint
from sr_assets.adapters.state.operator_settings import added_windows, paused_streams, set_paused
from sr_assets.adapters.state.orders import is_pending, request_checkpoint
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.status_file import SiteStatus, StreamStatus, write_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.automation.observing import find_work, is_idle
from sr_assets.domain.errors import LeadershipLostError, RunError
from sr_assets.settings import Settings
from sr_assets.stages.checkpointing import find_checkpoint, restore_newer, restore_site, store_state
from sr_assets.stages.operator_commands import save_site
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.examples import one_in
from sr_assets_tests.members import elected, make_bucket, member
from sr_assets_tests.rig import SITE, Command, Rig, Sent, address, wait_until
from sr_assets_tests.test_cli_members import use

pytestmark = pytest.mark.process

TRACKED: dict[str, Any] = {"inspect_field": "sender", "inspect_duration": "10h", "size_trigger": 1}


def numbered(first: int, after: int) -> list[Sent]:
    bodies = [{"sender": f"n{n % 5}", "n": n, "pad": "x" * (n % 3)} for n in range(first, after)]
    return [Sent(json.dumps(body).encode()) for body in bodies]


def add(rig: Rig) -> tuple[str, str]:
    """Configure a tracked stream with advisories; neither stream recognises a repeated message for long."""
    stream, feed = rig.make(), rig.make("FEED", duplicate_window=100_000_000)
    rig.create(stream, rig.target, duplicate_window=100_000_000)
    rig.add(stream, **TRACKED, advisory={"subject": f"{feed}.%s.%v", "reliable": True})
    return stream, feed


#: The tables that a restored state without a predecessor has after its first run: it reads the files of the history.
NO_INDEX: Final = dict[str, list[tuple[Any, ...]]](history=[], snapshots=[])


def state_rows(rig: Rig) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of the state by table, except the numbers of its commits."""
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb"), read_only=True) as connection:
        tables = connection.execute("SELECT table_name FROM duckdb_tables() WHERE NOT temporary").fetchall()
        return {
            table: connection.execute(f"FROM {table} ORDER BY ALL").fetchall()
            for (table,) in tables
            if table != "commits"
        }


def lose_home(rig: Rig) -> None:
    rig.lose("sites", "snapshots")


@pytest.fixture
def store(rig: Rig) -> dict[str, Any]:
    """The keys of a store of this test alone."""
    return {"checkpoint": {"interval": "1s", "bucket": rig.unique("STATE")}}


def numbers(rig: Rig, stream: str) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]


def test_restored_state_equals_the_stored_one(rig: Rig, tmp_path: Path) -> None:
    add(rig)
    rig.publish(rig.entries[0]["stream"], numbered(1, 40))
    rig.drain()
    settings, before, file = rig.settings(), state_rows(rig), tmp_path / "checkpoint"
    assert "wrote a checkpoint" in save_site(settings, SITE, file)
    assert state_rows(rig) == before
    (rig.home / "sites" / SITE / "state.duckdb").unlink()
    assert restore_site(settings, SITE, file).startswith(f"{SITE}: restored the checkpoint of ")
    assert state_rows(rig) == {**before, **NO_INDEX}
    rig.drain()
    assert {table: state_rows(rig)[table] for table in NO_INDEX} == {table: before[table] for table in NO_INDEX}
    assert all(len(before[table]) == 5 for table in ("transitions", "nodes", "snapshots"))


def test_checkpoint_of_an_earlier_build_is_restored(rig: Rig, tmp_path: Path) -> None:
    add(rig)
    rig.publish(rig.entries[0]["stream"], numbered(1, 40))
    rig.drain()
    settings, before, file = rig.settings(), state_rows(rig), tmp_path / "checkpoint"
    save_site(settings, SITE, file)
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(tmp_path / "earlier", "w") as earlier:
        for name in whole.namelist():
            if name not in ("answered_requests.parquet", "commits.parquet"):
                earlier.writestr(name, whole.read(name))
    (rig.home / "sites" / SITE / "state.duckdb").unlink()
    restore_site(settings, SITE, tmp_path / "earlier")
    assert state_rows(rig) == {**before, **NO_INDEX}


def test_state_of_an_earlier_build_gets_the_missing_parts(rig: Rig) -> None:
    add(rig)
    rig.publish(rig.entries[0]["stream"], numbered(1, 40))
    rig.drain()
    before = state_rows(rig)
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb")) as state:
        state.execute("DROP TABLE answered_requests")
        state.execute("DROP TABLE commits")
        state.execute("ALTER TABLE transitions DROP COLUMN undone_ns")
    rig.drain()
    assert {table: len(rows) for table, rows in state_rows(rig).items()} == {
        table: len(rows) for table, rows in before.items()
    }


def test_empty_home_continues_from_the_stored_checkpoint(rig: Rig, store: dict[str, Any]) -> None:
    stream, feed = add(rig)
    rig.publish(stream, numbered(1, 20))
    rig.drain(**store)
    newest = find_checkpoint(rig.settings(**store), SITE)
    assert newest is not None
    assert newest == last_stored(rig.home / "sites" / SITE)
    assert newest.positions == {stream: 20}
    # Work after the checkpoint, which the next host does not know.
    rig.publish(stream, numbered(20, 40))
    rig.drain()
    counts = rig.row("SELECT seen_messages, copied_messages, skipped_messages FROM replication")
    copies, advisories = numbers(rig, stream), len(rig.stored(feed))
    lose_home(rig)
    rig.publish(stream, numbered(40, 41))
    rig.drain(**store)
    assert numbers(rig, stream) == [*copies, 40]
    assert len(rig.stored(feed)) == advisories
    after = rig.row("SELECT seen_messages, copied_messages, skipped_messages FROM replication")
    assert after == {**counts, "seen_messages": 40, "copied_messages": counts["copied_messages"] + 1}


def test_checkpoint_is_written_during_a_publication(rig: Rig, tmp_path: Path) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    rig.drain()
    attach = f"ATTACH '{tmp_path}/other.duckdb' AS fleet"
    with rig.open() as site, site.state.second_connection() as publishing:
        publishing.connection.execute(attach)
        publishing.connection.execute("CREATE TABLE fleet.snapshot_info (run_id VARCHAR)")
        with site.state.read_snapshot():
            about = write_checkpoint(
                site.state.connection.raw,
                tmp_path / "checkpoint",
                replicator=SITE,
                site=SITE,
                at_ns=1,
                identities={},
                paused=frozenset(),
            )
            # The writer's transaction does not hold the other file.
            publishing.connection.execute("DETACH fleet")
            publishing.connection.execute(attach)
            publishing.connection.execute("DETACH fleet")
    assert about.positions == {stream: 9}


def test_checkpoint_contains_no_secret(rig: Rig, tmp_path: Path) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    rig.drain()
    url = rig.source.url.replace("nats://", "nats://admin:S3cret-of-the-fleet@")
    rig.entries[0]["source_url"] = url
    save_site(rig.settings(), SITE, tmp_path / "checkpoint")
    with zipfile.ZipFile(tmp_path / "checkpoint") as archive:
        assert not [name for name in archive.namelist() if b"S3cret" in archive.read(name)]


def change_about(file: Path, **fields: object) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["about.json"] = json.dumps({**json.loads(parts["about.json"]), **fields}).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    """Change a byte of the first table: not every byte of an archive has a checksum."""
    content = bytearray(file.read_bytes())
    content[content.index(b"PAR1") + 8] ^= 255
    file.write_bytes(content)


def change_directory(file: Path) -> None:
    """Change the version that the first entry of the archive's directory demands."""
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + 6] ^= 255
    file.write_bytes(content)


#: How a checkpoint is damaged, and the problem in the error.
DAMAGES: tuple[tuple[Callable[[Path], object], str], ...] = (
    (lambda file: change_about(file, format=2), "upgrade this host first"),
    (lambda file: change_about(file, site="PARIS"), "is a checkpoint of LONDON/PARIS, not of LONDON/LONDON"),
    (lambda file: change_about(file, unknown=1), "is not a complete checkpoint"),
    (cut, "is not a complete checkpoint"),
    (flip, "use another one"),
    (change_directory, "is not a complete checkpoint"),
    (lambda file: file.write_text("not a checkpoint"), "is not a complete checkpoint"),
)


def test_unusable_checkpoint_leaves_the_state_untouched(rig: Rig, tmp_path: Path) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    rig.drain()
    file, before = tmp_path / "checkpoint", state_rows(rig)
    save_site(rig.settings(), SITE, file)
    whole = file.read_bytes()
    for damage, problem in DAMAGES:
        file.write_bytes(whole)
        damage(file)
        with pytest.raises(RunError, match=problem) as raised:
            restore_site(rig.settings(), SITE, file)
        assert "\n" not in str(raised.value)
        assert state_rows(rig) == before, problem


def test_unusable_stored_checkpoint_does_not_stop_a_new_site(rig: Rig, tmp_path: Path, store: dict[str, Any]) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    text = tmp_path / "text"
    text.write_text("not a checkpoint")
    with ObjectBucket(address(rig.source), store["checkpoint"]["bucket"]) as bucket:
        bucket.put(f"{SITE}/{SITE}", text, {"at_ns": 1, "positions": {stream: 9}})
    rig.drain(**store)
    assert numbers(rig, stream) == [1, 2, 3]


@pytest.mark.parametrize("is_elected", (True, pytest.param(False, marks=pytest.mark.nightly)))
def test_failed_restore_does_not_prevent_a_later_one(rig: Rig, is_elected: bool) -> None:
    """An unreachable or damaged store leaves a home with an empty state, which stops, and replaces no checkpoint."""
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    top = elected("a", make_bucket(rig)) if is_elected else {"checkpoint": {"bucket": rig.unique("STATE")}}
    rig.drain(**top)
    lose_home(rig)
    (report,) = rig.run(**{**top, "checkpoint": {"bucket": rig.unique("LOST")}}).values()
    assert report.failure is not None
    assert "recover" in report.failure
    settings = rig.settings(**top)
    store = settings.checkpoint_store(SITE)
    assert store is not None
    with SiteState(rig.home / "sites" / SITE) as state, pytest.raises(RunError, match="this home has no state of it"):
        store_state(settings, store, SITE, state)
    rig.publish(stream, numbered(9, 10))
    rig.drain(**top)
    assert numbers(rig, stream) == list(range(1, 10))


def test_full_store_is_a_warning_only(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.api(
        "STREAM.CREATE.OBJ_FULL",
        {"name": "OBJ_FULL", "subjects": ["$O.FULL.C.>", "$O.FULL.M.>"], "max_bytes": 500, "discard": "new"},
    )
    rig.drain(checkpoint={"bucket": "FULL"})
    assert numbers(rig, stream) == [1, 2, 3]
    (warning,) = [record.message for record in caplog.records if "no checkpoint was stored" in record.message]
    assert "object store FULL" in warning


def test_full_disk_is_a_warning_of_one_line(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sr_assets.adapters.state.checkpoint.zipfile.ZipFile", full)
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain(checkpoint={"bucket": "ROOM"})
    assert numbers(rig, stream) == [1, 2, 3]
    (warning,) = [record for record in caplog.records if "checkpoint" in record.message]
    assert "no checkpoint was stored" in warning.message
    assert "No space left on device" in warning.message
    assert warning.exc_info is None


def test_pause_is_part_of_the_checkpoint(rig: Rig, tmp_path: Path) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    settings = rig.settings()
    set_paused(settings, settings.streams[0], True)
    save_site(settings, SITE, tmp_path / "checkpoint")
    lose_home(rig)
    restore_site(settings, SITE, tmp_path / "checkpoint")
    assert paused_streams(rig.home / "sites" / SITE) == {stream}


def test_restored_site_is_due_although_it_was_idle(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    settings = rig.settings()
    save_site(settings, SITE, tmp_path / "checkpoint")
    assert is_idle(settings, SITE)
    restore_site(settings, SITE, tmp_path / "checkpoint")
    assert not is_idle(settings, SITE)
    assert find_work(settings, SITE).reason == "the state was changed"
    rig.drain()
    assert find_work(settings, SITE).reason is None


def test_leader_keeps_its_own_state(rig: Rig) -> None:
    """Not even a removed stream in the checkpoint makes that look newer."""
    top, gone = elected("a", make_bucket(rig)), rig.make()
    stream = rig.make()
    for name in (gone, stream):
        rig.add(name)
        rig.publish(name, numbered(1, 4))
    rig.drain(**top)
    newest = find_checkpoint(rig.settings(**top), SITE)
    assert newest is not None
    assert newest.positions == {gone: 4, stream: 4}
    rig.entries.pop(0)
    rig.publish(stream, numbered(4, 6))
    for _ in range(2):
        rig.drain(**top)
    assert numbers(rig, stream) == [1, 2, 3, 4, 5]
    assert list((rig.home / "sites" / SITE).glob("*.replaced-*")) == []


def test_leader_keeps_the_commits_that_it_has_not_published(rig: Rig) -> None:
    top, stream = elected("a", make_bucket(rig)), rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain(**top)
    with rig.open(**top) as site:
        commit(site.state, stream, 7, read=True)
    assert find_checkpoint(rig.settings(**top), SITE).positions == {stream: 5}  # type: ignore[union-attr]
    with rig.open(**top) as site:
        assert value_of(site.state, stream) == 7
    assert list((rig.home / "sites" / SITE).glob("*.replaced-*")) == []


@pytest.mark.parametrize(
    "status", (pytest.param(None, id="missing"), pytest.param("", id="empty", marks=pytest.mark.nightly))
)
def test_home_without_a_status_keeps_its_state(rig: Rig, store: dict[str, Any], status: str | None) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain(**store)
    rig.publish(stream, numbered(4, 6))
    rig.drain()
    assert control.change(rig.home, "UPDATE site_status SET status = ?", status) == 1
    with rig.open(**store) as site:
        state = site.state.load_stream(stream)
    assert state is not None
    assert state.next_sequence == 6


def test_state_that_an_operator_restored_is_kept(rig: Rig, tmp_path: Path) -> None:
    top, (stream, _) = elected("a", make_bucket(rig)), add(rig)
    rig.publish(stream, numbered(1, 9))
    rig.drain(**top)
    save_site(rig.settings(**top), SITE, tmp_path / "checkpoint")
    rig.publish(stream, numbered(9, 20))
    rig.drain(**top)
    restore_site(rig.settings(**top), SITE, tmp_path / "checkpoint")
    with rig.open(**top) as site:
        state = site.state.load_stream(stream)
    assert state is not None
    assert state.next_sequence == 9


def test_commit_is_numbered_by_the_clock_of_the_source(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    began_ns = rig.clock_ns(stream)
    rig.drain()
    with rig.open() as site:
        assert began_ns < site.state.last_commit() < rig.clock_ns(stream)
        site.clock.set(began_ns)
        before = site.state.last_commit()
        commit(site.state, stream, 1, read=False)
        assert site.state.last_commit() == before + 1


def commit(state: SiteState, stream: str, value: int, *, read: bool) -> None:
    """Commit a value, and with `read` a later position."""
    row = state.load_stream(stream) or StreamState(stream, 1, 1)
    row.skipped_messages, row.next_sequence = value, row.next_sequence + read
    with state.transaction():
        state.save_stream(row)


def value_of(state: SiteState, stream: str) -> int:
    row = state.load_stream(stream)
    return row.skipped_messages if row else 0


class Members:
    """Two homes that lead a site in turn. A value rises with each commit, whichever home makes it."""

    def __init__(self, rig: Rig, folder: Path, bucket: str) -> None:
        self.stream, self.homes = rig.entries[0]["stream"], [member(rig, folder, name, bucket) for name in "ab"]
        self.held, self.stored, self.last = [0, 0], 0, 0

    def lead(self, home: int, steps: list[str]) -> None:
        """Start a home, check what it continues from, take some steps, and end as in a crash."""
        settings = self.homes[home]
        folder, store = settings.home / "sites" / SITE, settings.checkpoint_store(SITE)
        own_folder(folder)
        assert store is not None
        restore_newer(settings, SITE)
        with SiteState(folder, time_ns=time.time_ns) as state:
            assert value_of(state, self.stream) == max(self.held[home], self.stored)
            self.held[home] = value_of(state, self.stream)
            for step in steps:
                if step in ("read", "commit"):
                    self.last += 1
                    commit(state, self.stream, self.last, read=step == "read")
                    self.held[home] = self.last
                elif step == "checkpoint":
                    store_state(settings, store, SITE, state)
                    self.stored = self.held[home]
                elif step == "publish" and (row := state.load_stream(self.stream)):
                    status = StreamStatus(created_ns=row.created_ns, next_sequence=row.next_sequence)
                    write_status(folder, SiteStatus({self.stream: status}, committed_at_ns=time.time_ns()))
                elif step == "lose status":
                    control.change(settings.home, "DELETE FROM site_status")


STEPS = ("read", "commit", "checkpoint", "publish", "lose status")


@one_in(25)
@given(turns=st.lists(st.tuples(st.sampled_from((0, 1)), st.lists(st.sampled_from(STEPS), max_size=5)), max_size=5))
@example(turns=[(0, ["read", "publish", "read", "checkpoint", "commit"]), (0, [])])
@example(turns=[(0, ["read", "checkpoint", "commit", "commit"]), (1, ["commit", "checkpoint"]), (0, []), (1, [])])
@example(turns=[(0, ["read", "publish", "checkpoint", "commit", "lose status"]), (0, [])])
def test_home_never_goes_back_behind_its_last_commit(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, list[str]]]
) -> None:
    """Each home continues from its own last commit or from another's stored one, whichever is later."""
    if not rig.entries:
        rig.add(rig.make())
    members = Members(rig, tmp_path_factory.mktemp("members"), rig.unique("ELECTION"))
    for home, steps in turns:
        members.lead(home, steps)


def drain(settings: Settings) -> None:
    with Site(settings, SITE, owner="test", run_id="test") as site:
        reports = run_site(site, {entry.stream: frozenset(Stage) for entry in site.entries}, drain_only=True)
    assert [report.failure for report in reports.values() if report.failure] == []


def is_retired(settings: Settings, node: str) -> bool:
    rows = node_states(settings.home, node)
    return [dict(zip(rows.columns, row, strict=True))["status"] for row in rows.values] == ["retired"]


# A window is an operator's setting like a pause.
@pytest.mark.parametrize("change", ("pause", "retire", pytest.param("maintenance", marks=pytest.mark.nightly)))
def test_next_leader_has_what_an_operator_changed_at_a_quiet_site(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, change: str
) -> None:
    stream, _ = add(rig)
    rig.publish(stream, numbered(1, 9))
    bucket = make_bucket(rig)
    first, second = member(rig, tmp_path, "a", bucket), member(rig, tmp_path, "b", bucket)
    drain(first)
    rig.await_clock(stream, rig.stored(stream)[-1].stored_ns + 1_000_000_000)
    drain(second)
    use(monkeypatch, tmp_path / "b")
    arguments = {
        "pause": ("pause", "--stream", stream),
        "maintenance": ("maintenance", "add", "--match", "n1", "--for", "1h", "--reason", "test"),
        "retire": ("retire", "n1"),
    }
    assert command(*arguments[change])[::2] == (0, "")
    if change != "retire":
        assert find_work(second, SITE).reason == "a checkpoint is requested"
        drain(second)
    assert find_work(second, SITE).reason is None
    drain(first)
    folder = first.home / "sites" / SITE
    changed = {
        "pause": bool(paused_streams(folder)),
        "maintenance": bool(added_windows(folder)),
        "retire": is_retired(first, "n1"),
    }
    assert changed == {name: name == change for name in changed}


def test_request_during_a_checkpoint_is_served_by_another_one(
    rig: Rig, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = rig.make()
    stored: list[Stored] = []
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain(**store)
    store["checkpoint"]["interval"] = "1h"
    put = ObjectBucket.put
    with rig.open(**store) as site:
        commit(site.state, stream, 1, read=False)

        def put_slowly(bucket: ObjectBucket, *arguments: Any) -> None:
            """While the first checkpoint is on its way, commit and request another one."""
            if not stored:
                commit(site.state, stream, 2, read=False)
                request_checkpoint(site.settings, SITE)
            put(bucket, *arguments)
            newest = find_checkpoint(site.settings, SITE)
            assert newest is not None
            stored.append(newest)

        monkeypatch.setattr(ObjectBucket, "put", put_slowly)
        request_checkpoint(site.settings, SITE)
        wait_until(lambda: not is_pending(site.folder, "checkpoint"), "the requests to be served")
        assert stored[-1].commit == site.state.last_commit()
    assert len(stored) == 2


def test_expensive_checkpoint_delays_the_next_one(
    rig: Rig, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain(**store)
    store["checkpoint"]["interval"] = "60s"
    # The CPU time of the thread: a checkpoint takes 3 s, so the next one waits for 400 s.
    turns: list[float] = []

    def take_three_seconds() -> float:
        turns.append(3.0)
        return sum(turns)

    with rig.open(**store) as site:
        monkeypatch.setattr(time, "thread_time", take_three_seconds)

        def is_stored() -> bool:
            newest = find_checkpoint(site.settings, SITE)
            return newest is not None and newest.commit == site.state.last_commit()

        def await_turn() -> None:
            """Wait until the thread has ended its present turn and begun another one."""
            before = len(turns)
            wait_until(lambda: len(turns) > before + 1, "the thread to look again")

        commit(site.state, stream, 1, read=False)
        rig.travel(seconds=61)
        wait_until(is_stored, "the first checkpoint")
        await_turn()
        commit(site.state, stream, 2, read=False)
        rig.travel(seconds=200)
        await_turn()
        assert not is_stored()
        rig.travel(seconds=201)
        wait_until(is_stored, "the second checkpoint")


def test_suspended_leader_replaces_no_later_checkpoint(rig: Rig, tmp_path: Path) -> None:
    """Another member leads and stores its state while the first one is about to replace the object."""
    stream = rig.make()
    rig.add(stream)
    bucket = rig.unique("ELECTION")
    homes = [member(rig, tmp_path, name, bucket) for name in "ab"]
    stores = [store for settings in homes if (store := settings.checkpoint_store(SITE))]
    for home in homes:
        own_folder(home.home / "sites" / SITE)
    with (
        SiteState(homes[0].home / "sites" / SITE, time_ns=time.time_ns) as old,
        SiteState(homes[1].home / "sites" / SITE, time_ns=time.time_ns) as new,
    ):
        for state in (old, new):
            commit(state, stream, 1, read=True)
        store_state(homes[0], stores[0], SITE, old)
        commit(old, stream, 2, read=True)
        for _ in range(2):
            commit(new, stream, 3, read=True)
        calls = []

        def resume() -> None:
            calls.append(1)
            if len(calls) == 2:
                store_state(homes[1], stores[1], SITE, new)
                raise LeadershipLostError("another member leads")

        with pytest.raises(LeadershipLostError):
            store_state(homes[0], stores[0], SITE, old, resume)
        with pytest.raises(RunError, match="holds a later checkpoint"):
            store_state(homes[0], stores[0], SITE, old)
    newest = find_checkpoint(homes[0], SITE)
    assert newest is not None
    assert newest.positions == {stream: 4}


def test_checkpoint_is_not_replaced_after_the_lease_has_ended(rig: Rig, store: dict[str, Any]) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain(**store)
    before, settings = find_checkpoint(rig.settings(**store), SITE), rig.settings(**store)
    calls = []

    def guard() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise LeadershipLostError("the lease has ended")

    with rig.open() as site:
        commit(site.state, stream, 1, read=True)
        where = settings.checkpoint_store(SITE)
        assert where is not None
        with pytest.raises(LeadershipLostError):
            store_state(settings, where, SITE, site.state, guard)
    assert find_checkpoint(settings, SITE) == before


def test_repeated_restore_keeps_the_newest_two_replaced_states(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.drain()
    save_site(rig.settings(), SITE, tmp_path / "checkpoint")
    for _ in range(4):
        restore_site(rig.settings(), SITE, tmp_path / "checkpoint")
    assert len(list((rig.home / "sites" / SITE).glob("state.duckdb.replaced-*"))) == 2
