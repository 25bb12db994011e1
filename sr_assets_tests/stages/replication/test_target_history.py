"""What follows when the target is not what it was: rolled back, purged, made again, or written to by another."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sr_assets.adapters.state.records import CopyState, Intent
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.stages.replication.batch import Batch
from sr_assets_tests.rig import SITE, Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "10m"}


def numbered(first: int, after: int) -> list[Sent]:
    return [Sent(b'{"sender": "n%d", "n": %d}' % (n, n)) for n in range(first, after)]


def payloads(rig: Rig, stream: str) -> list[int]:
    return [int(copy.payload.rpartition(b" ")[2].rstrip(b"}")) for copy in rig.copies(stream)]


@pytest.fixture
def frail(rig: Rig, tmp_path: Path) -> Iterator[Rig]:
    """A site whose target server is its own, so that its disk can be set back."""
    with NatsServer(tmp_path / "frail", "frail") as target:
        rig.target = target
        yield rig


@pytest.fixture
def set_back(frail: Rig, tmp_path: Path) -> Callable[[str], None]:
    """A function: `save` keeps the target's disk as it is now, `restore` sets it back to that."""
    disk, saved = tmp_path / "frail", tmp_path / "saved"

    def act(action: str) -> None:
        frail.target.stop()
        old, new = (disk, saved) if action == "save" else (saved, disk)
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(old, new)
        frail.target.start()

    return act


@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
def test_what_a_rolled_back_target_lost_is_sent_again_before_what_is_new(
    frail: Rig, set_back: Callable[[str], None], entry: dict[str, str]
) -> None:
    stream = frail.make()
    frail.add(stream, **entry)
    frail.publish(stream, numbered(1, 4))
    frail.drain()
    set_back("save")
    frail.publish(stream, numbered(4, 8))
    frail.drain()
    before = frail.row("SELECT * EXCLUDE (as_of, watermark, next_deadline) FROM replication")
    set_back("restore")
    assert payloads(frail, stream) == [1, 2, 3]
    reports = frail.drain()
    assert payloads(frail, stream) == [1, 2, 3, 4, 5, 6, 7]
    assert reports[stream].resent == 4
    assert frail.row("SELECT * EXCLUDE (as_of, watermark, next_deadline) FROM replication") == before
    frail.publish(stream, numbered(8, 10))
    reports = frail.drain()
    assert reports[stream].resent == 0
    assert payloads(frail, stream) == list(range(1, 10))
    assert not frail.rows("gaps")


def test_what_the_source_has_lost_too_is_a_gap(frail: Rig, set_back: Callable[[str], None]) -> None:
    stream = frail.make()
    frail.add(stream)
    frail.publish(stream, numbered(1, 4))
    frail.drain()
    set_back("save")
    frail.publish(stream, numbered(4, 8))
    frail.drain()
    for sequence in (4, 5, 7):
        frail.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    set_back("restore")
    frail.drain()
    assert payloads(frail, stream) == [1, 2, 3, 6]
    gaps = frail.rows("SELECT first_sequence, last_sequence, messages, reason FROM gaps ORDER BY ALL")
    assert gaps == [
        {"first_sequence": 4, "last_sequence": 5, "messages": 2, "reason": "lost"},
        {"first_sequence": 7, "last_sequence": 7, "messages": 1, "reason": "lost"},
    ]
    counted = frail.row("replication")
    assert counted["gap_messages"] == 3
    assert counted["seen_messages"] == counted["copied_messages"]


def test_a_rolled_back_target_that_was_written_to_since_is_noticed_by_what_is_stored_in_place_of_our_copies(
    frail: Rig, set_back: Callable[[str], None]
) -> None:
    stream = frail.make()
    frail.add(stream)
    frail.publish(stream, numbered(1, 4))
    frail.drain()
    set_back("save")
    frail.publish(stream, numbered(4, 6))
    frail.drain()
    set_back("restore")
    frail.publish(stream, numbered(91, 95), frail.target)
    frail.drain()
    assert payloads(frail, stream) == [1, 2, 3, 91, 92, 93, 94, 4, 5]


def test_a_batch_that_was_open_when_the_target_was_rolled_back_comes_after_what_was_lost(
    frail: Rig, set_back: Callable[[str], None]
) -> None:
    stream = frail.make()
    frail.add(stream)
    frail.publish(stream, numbered(1, 4))
    frail.drain()
    set_back("save")
    frail.publish(stream, numbered(4, 6))
    frail.drain()
    frail.publish(stream, numbered(6, 9))
    info = frail.info(stream, frail.target)
    with frail.open() as site:
        source = frail.info(stream)
        intent = Intent(stream, 6, 6, 9, source.ts_ns, None, source.created_ns, info.created_ns, 5)
        with site.state.transaction():
            site.state.save_intent(intent)
    set_back("restore")
    frail.drain()
    assert payloads(frail, stream) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_purged_target_is_no_reason_to_send_anything_again(frail: Rig) -> None:
    stream = frail.make()
    frail.add(stream)
    frail.publish(stream, numbered(1, 4))
    frail.drain()
    frail.api(f"STREAM.PURGE.{stream}", server=frail.target)
    frail.publish(stream, numbered(4, 6))
    frail.drain()
    assert payloads(frail, stream) == [4, 5]
    assert not frail.rows("gaps")


@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
def test_a_target_that_was_made_again_gets_everything_again_when_that_is_wanted(
    rig: Rig, entry: dict[str, str]
) -> None:
    stream = rig.make()
    rig.add(stream, on_target_reset="recopy", batch_messages=2, **entry)
    rig.publish(stream, numbered(1, 6))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 2})
    rig.publish(stream, numbered(6, 8))
    reports = rig.drain()
    assert payloads(rig, stream) == [1, 3, 4, 5, 6, 7]
    assert reports[stream].resent == 4
    assert not rig.rows("gaps")
    assert rig.row("replication")["seen_messages"] == 7
    assert rig.drain()[stream].resent == 0


@pytest.mark.parametrize("there", (True, False))
def test_a_target_that_is_gone_stops_the_stream_when_that_is_wanted(rig: Rig, there: bool) -> None:
    stream = rig.make()
    rig.add(stream, on_target_reset="stop")
    rig.publish(stream, numbered(1, 3))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    if there:
        rig.create(stream, rig.target)
    failure = rig.failure()
    assert "on_target_reset" in failure
    assert ("recreated" in failure) is there


def test_a_state_from_a_backup_is_not_mistaken_for_a_crash_and_stops(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    shutil.copytree(rig.home / "sites", tmp_path / "sites")
    rig.publish(stream, numbered(4, 6))
    rig.drain()
    shutil.rmtree(rig.home / "sites")
    shutil.copytree(tmp_path / "sites", rig.home / "sites")
    rig.publish(stream, numbered(6, 8))
    failure = rig.failure()
    assert "no batch of this site made" in failure
    assert f"sr-assets recover --stream {rig.settings().streams[0].label}" in failure
    assert payloads(rig, stream) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("copied", (0, 2))
def test_a_batch_that_was_open_when_its_target_was_deleted_is_done_in_the_new_one(rig: Rig, copied: int) -> None:
    stream = rig.make()
    rig.add(stream)
    if copied:
        rig.publish(stream, numbered(1, 3))
    rig.create(stream, rig.target)
    rig.drain()
    rig.publish(stream, numbered(copied + 1, copied + 3))
    source, made_ns = rig.info(stream), rig.info(stream, rig.target).created_ns
    with rig.open() as site, site.state.transaction():
        first, after = copied + 1, copied + 3
        intent = Intent(stream, first, first, after, source.ts_ns, None, source.created_ns, made_ns, copied)
        site.state.save_intent(intent)
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.drain()
    assert payloads(rig, stream) == [copied + 1, copied + 2]


@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
def test_a_batch_that_was_open_when_its_target_was_renamed_comes_after_what_is_copied_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, str]
) -> None:
    stream = rig.make()
    configured = rig.add(stream, on_target_reset="recopy", batch_messages=5, **entry)
    rig.publish(stream, numbered(1, 8))
    rig.drain()
    rig.publish(stream, numbered(8, 20))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Batch, "_note_copies", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    assert payloads(rig, stream) == list(range(1, 13))
    renamed = configured["target_stream"] = f"{stream}_NEW"
    configured["target_subject_prefix"] = "new"
    rig.drain()
    assert payloads(rig, renamed) == list(range(1, 20))
    assert rig.row("replication")["copied_messages"] == 19


def test_the_first_look_through_a_target_goes_on_where_it_was_cut_off(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    # The state is lost: only a look through the target tells that there are copies.
    shutil.rmtree(rig.home / "sites" / SITE)
    assert "already holds copies" in rig.failure()
    created_ns = rig.info(stream, rig.target).created_ns
    for looked_ns, looked, number in ((created_ns - 1, 3, 1), (created_ns, 1, 2), (created_ns, 3, None)):
        with rig.open() as site, site.state.transaction():
            site.state.save_copying(CopyState(stream, target_looked=looked, target_looked_ns=looked_ns))
        failure = rig.run()[stream].failure or ""
        assert (f"already holds copies of it ({number} at {number})" in failure) is (number is not None), failure


def test_a_long_look_says_how_far_it_is_and_saves_that(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("sr_assets.stages.progress._LOOK_SECONDS", 0.0)
    stream, target = rig.make(), rig.unique("T")
    rig.create(target, rig.target, subjects=[f"{stream}.>", f"{target}.>"])
    rig.add(stream, target_stream=target)
    rig.publish(target, numbered(1, 301), rig.target)
    rig.run()
    assert f"scanning target stream {target}: 300 of 300, " in caplog.text
    with rig.open() as site:
        copying = site.state.load_copying(stream)
    assert (copying.target_looked, copying.target_looked_ns) == (300, rig.info(target, rig.target).created_ns)


@pytest.mark.parametrize("prefixes", (("a", "b"), ("", "")), ids=("subjects of their own", "the same subjects"))
def test_another_writer_is_noticed_on_a_target_of_many_sites(
    rig: Rig, tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    stream, target = rig.make(), rig.unique("SHARED")
    subjects = [f"{prefix}.>" for prefix in prefixes] if prefixes[0] else [f"{stream}.>"]
    rig.create(target, rig.target, subjects=subjects)
    for site, prefix in zip((SITE, "other"), prefixes, strict=True):
        rig.add(stream, name=site, target_stream=target, target_subject_prefix=prefix)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    state = rig.home / "sites" / SITE / "state.duckdb"
    shutil.copy(state, tmp_path / "older")
    rig.publish(stream, numbered(4, 6))
    rig.drain()
    rig.drain("other")
    shutil.copy(tmp_path / "older", state)
    rig.publish(stream, numbered(6, 8))
    assert "that no batch of this site made" in rig.failure()
    # Those of others are nothing of ours.
    rig.drain("other")
    assert len(rig.copies(target)) == 5 + 7
