"""Targets that were rolled back, purged, recreated, or written to by others."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.state.records import CopyState, Intent
from sr_assets.domain.messages import header_writer
from sr_assets.stages.replication import replica, target_review
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets.stages.report import Stage
from sr_assets.stages.run import SiteRun
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until
from sr_assets_tests.servers import NatsServer

TRACKED = {"inspect_field": "sender", "inspect_duration": "10m"}
#: A sampled stream does more: its queue holds the messages to copy.
KINDS = pytest.mark.parametrize(
    "entry", (pytest.param(TRACKED, id="sampled"), pytest.param({}, id="plain", marks=pytest.mark.nightly))
)


def numbered(first: int, after: int) -> list[Sent]:
    return [Sent(b'{"sender": "n%d", "n": %d}' % (n, n)) for n in range(first, after)]


def payloads(rig: Rig, stream: str) -> list[int]:
    return [int(copy.payload.rpartition(b" ")[2].rstrip(b"}")) for copy in rig.copies(stream)]


@pytest.fixture
def restorable(rig: Rig, tmp_path: Path) -> Iterator[Rig]:
    """A site with its own target server, whose disk can be restored."""
    with NatsServer(tmp_path / "frail", "frail") as target:
        rig.target = target
        yield rig


@pytest.fixture
def restore_target(restorable: Rig, tmp_path: Path) -> Callable[[str], None]:
    """Return a function: `save` copies the target's disk, `restore` restores that copy."""
    disk, saved = tmp_path / "frail", tmp_path / "saved"

    def act(action: str) -> None:
        restorable.target.stop()
        old, new = (disk, saved) if action == "save" else (saved, disk)
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(old, new)
        restorable.target.start()

    return act


@KINDS
def test_copies_lost_in_a_target_rollback_are_resent_first(
    restorable: Rig, restore_target: Callable[[str], None], entry: dict[str, str]
) -> None:
    stream = restorable.make()
    restorable.add(stream, **entry)
    restorable.publish(stream, numbered(1, 4))
    restorable.drain()
    restore_target("save")
    restorable.publish(stream, numbered(4, 8))
    restorable.drain()
    before = restorable.row("SELECT * EXCLUDE (as_of, watermark, next_deadline) FROM replication")
    restore_target("restore")
    assert payloads(restorable, stream) == [1, 2, 3]
    reports = restorable.drain()
    assert payloads(restorable, stream) == [1, 2, 3, 4, 5, 6, 7]
    assert reports[stream].resent == 4
    assert restorable.row("SELECT * EXCLUDE (as_of, watermark, next_deadline) FROM replication") == before
    restorable.publish(stream, numbered(8, 10))
    reports = restorable.drain()
    assert reports[stream].resent == 0
    assert payloads(restorable, stream) == list(range(1, 10))
    assert not restorable.rows("gaps")


def test_copies_lost_on_both_sides_are_a_gap(restorable: Rig, restore_target: Callable[[str], None]) -> None:
    stream = restorable.make()
    restorable.add(stream)
    restorable.publish(stream, numbered(1, 4))
    restorable.drain()
    restore_target("save")
    restorable.publish(stream, numbered(4, 8))
    restorable.drain()
    for sequence in (4, 5, 7):
        restorable.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    restore_target("restore")
    restorable.drain()
    assert payloads(restorable, stream) == [1, 2, 3, 6]
    gaps = restorable.rows("SELECT first_sequence, last_sequence, messages, reason FROM gaps ORDER BY ALL")
    assert gaps == [
        {"first_sequence": 4, "last_sequence": 5, "messages": 2, "reason": "lost"},
        {"first_sequence": 7, "last_sequence": 7, "messages": 1, "reason": "lost"},
    ]
    counted = restorable.row("replication")
    assert counted["gap_messages"] == 3
    assert counted["seen_messages"] == counted["copied_messages"]


def test_target_rollback_is_detected_after_other_writes(restorable: Rig, restore_target: Callable[[str], None]) -> None:
    stream = restorable.make()
    restorable.add(stream)
    restorable.publish(stream, numbered(1, 4))
    restorable.drain()
    restore_target("save")
    restorable.publish(stream, numbered(4, 6))
    restorable.drain()
    restore_target("restore")
    restorable.publish(stream, numbered(91, 95), restorable.target)
    restorable.drain()
    assert payloads(restorable, stream) == [1, 2, 3, 91, 92, 93, 94, 4, 5]


@pytest.mark.parametrize(
    ("same_connection", "entry"),
    (
        pytest.param(False, {}, id="reconnected-plain"),
        pytest.param(True, TRACKED, id="in_time-sampled"),
        pytest.param(False, TRACKED, id="reconnected-sampled", marks=pytest.mark.nightly),
        pytest.param(True, {}, id="in_time-plain", marks=pytest.mark.nightly),
    ),
)
def test_idle_run_detects_a_filled_target_rollback(
    restorable: Rig,
    restore_target: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    entry: dict[str, str],
    same_connection: bool,
) -> None:
    """While a run lingers with nothing to copy, its target is restored, and others fill it past our last copy."""
    monkeypatch.setattr(replica, "_COMPARE_SECONDS", 0.5 if same_connection else 3_600.0)
    if same_connection:
        monkeypatch.setattr(Cluster, "is_lost", False)
    stream = restorable.make()
    restorable.add(stream, **entry)
    restorable.publish(stream, numbered(1, 4))
    restorable.drain()
    restore_target("save")
    restorable.publish(stream, numbered(4, 6))
    with restorable.open(run_budget="1h", linger="1h") as site:
        run = SiteRun(site, {stream: frozenset(Stage)}, drain_only=False)
        with contextlib.closing(run.rounds()) as rounds:

            def copied(*numbers: int) -> bool:
                next(rounds)
                return payloads(restorable, stream) == list(numbers)

            wait_until(lambda: copied(1, 2, 3, 4, 5), "the copies")
            restore_target("restore")
            restorable.publish(stream, numbered(91, 95), restorable.target)
            wait_until(lambda: copied(1, 2, 3, 91, 92, 93, 94, 4, 5), "the copies' return")


def test_open_batch_follows_the_copies_resent_after_a_rollback(
    restorable: Rig, restore_target: Callable[[str], None]
) -> None:
    stream = restorable.make()
    restorable.add(stream)
    restorable.publish(stream, numbered(1, 4))
    restorable.drain()
    restore_target("save")
    restorable.publish(stream, numbered(4, 6))
    restorable.drain()
    restorable.publish(stream, numbered(6, 9))
    info = restorable.info(stream, restorable.target)
    with restorable.open() as site:
        source = restorable.info(stream)
        intent = Intent(stream, 6, 6, 9, source.ts_ns, None, source.created_ns, info.created_ns, 5)
        with site.state.transaction():
            site.state.save_intent(intent)
    restore_target("restore")
    restorable.drain()
    assert payloads(restorable, stream) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_purged_target_causes_no_resend(restorable: Rig) -> None:
    stream = restorable.make()
    restorable.add(stream)
    restorable.publish(stream, numbered(1, 4))
    restorable.drain()
    restorable.api(f"STREAM.PURGE.{stream}", server=restorable.target)
    restorable.publish(stream, numbered(4, 6))
    restorable.drain()
    assert payloads(restorable, stream) == [4, 5]
    assert not restorable.rows("gaps")


@KINDS
def test_recreated_target_is_refilled_if_configured(rig: Rig, entry: dict[str, str]) -> None:
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


@pytest.mark.parametrize("recreated", (True, False))
def test_deleted_target_stops_the_stream_if_configured(rig: Rig, recreated: bool) -> None:
    stream = rig.make()
    rig.add(stream, on_target_reset="stop")
    rig.publish(stream, numbered(1, 3))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    if recreated:
        rig.create(stream, rig.target)
    failure = rig.failure()
    assert "on_target_reset" in failure
    assert ("recreated" in failure) is recreated


@pytest.mark.parametrize("copied", (0, 2))
def test_open_batch_is_finished_in_a_recreated_target(rig: Rig, copied: int) -> None:
    stream = rig.make()
    rig.add(stream)
    if copied:
        rig.publish(stream, numbered(1, 3))
    rig.create(stream, rig.target)
    rig.drain()
    rig.publish(stream, numbered(copied + 1, copied + 3))
    source, target_created_ns = rig.info(stream), rig.info(stream, rig.target).created_ns
    with rig.open() as site, site.state.transaction():
        first, after = copied + 1, copied + 3
        intent = Intent(stream, first, first, after, source.ts_ns, None, source.created_ns, target_created_ns, copied)
        site.state.save_intent(intent)
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.drain()
    assert payloads(rig, stream) == [copied + 1, copied + 2]


@KINDS
def test_open_batch_follows_recopied_messages_into_a_renamed_target(
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
        patched.setattr(CopyBatch, "_note_copies", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    assert payloads(rig, stream) == list(range(1, 13))
    renamed = configured["target_stream"] = f"{stream}_NEW"
    configured["target_subject_prefix"] = "new"
    rig.drain()
    assert payloads(rig, renamed) == list(range(1, 20))
    assert rig.row("replication")["copied_messages"] == 19


def test_first_target_scan_resumes_where_it_stopped(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    # The state is lost: only a scan of the target finds the copies.
    shutil.rmtree(rig.home / "sites" / SITE)
    assert "already holds copies" in rig.failure()
    created_ns = rig.info(stream, rig.target).created_ns
    for scanned_ns, scanned, number in ((created_ns - 1, 3, 1), (created_ns, 1, 2), (created_ns, 3, None)):
        with rig.open() as site, site.state.transaction():
            site.state.save_copying(CopyState(stream, target_looked=scanned, target_looked_ns=scanned_ns))
        failure = rig.run()[stream].failure or ""
        assert (f"already holds copies of it ({number} at {number})" in failure) is (number is not None), failure


def test_long_target_scan_logs_and_saves_its_progress(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("sr_assets.adapters.progress_lines._LOOK_SECONDS", 0.0)
    stream, target = rig.make(), rig.unique("T")
    rig.create(target, rig.target, subjects=[f"{stream}.>", f"{target}.>"])
    rig.add(stream, target_stream=target)
    rig.publish(target, numbered(1, 301), rig.target)
    rig.run()
    assert f"scanning target stream {target}: 300 of 300, " in caplog.text
    with rig.open() as site:
        copying = site.state.load_copying(stream)
    assert (copying.target_looked, copying.target_looked_ns) == (300, rig.info(target, rig.target).created_ns)


@pytest.mark.parametrize(
    ("reset", "entry"),
    (
        pytest.param("continue", TRACKED, id="continue-sampled"),
        pytest.param("recopy", {}, id="recopy-plain"),
        pytest.param("continue", {}, id="continue-plain", marks=pytest.mark.nightly),
        pytest.param("recopy", TRACKED, id="recopy-sampled", marks=pytest.mark.nightly),
    ),
)
def test_returning_to_an_earlier_target_doubles_no_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, str], reset: str
) -> None:
    monkeypatch.setattr(target_review, "_OLD_ANSWERS_SECONDS", 0.0)
    stream, window = rig.make(), {"duplicate_window": 100_000_000}
    first, second = rig.unique("A"), rig.unique("B")
    for target in (first, second):
        rig.create(target, rig.target, subjects=[f"{target}.>"], **window)
    configured = rig.add(stream, on_target_reset=reset, **entry)
    for target, (at, after) in zip((first, second, first), ((1, 4), (4, 7), (7, 9)), strict=True):
        configured |= {"target_stream": target, "target_subject_prefix": target}
        rig.publish(stream, numbered(at, after))
        rig.drain()
    assert payloads(rig, second) == ([1, 2, 3, 4, 5, 6] if reset == "recopy" else [4, 5, 6])
    assert payloads(rig, first) == [1, 2, 3, *([4, 5, 6] if reset == "recopy" else []), 7, 8]


def test_second_writer_of_the_same_name_stops_the_active_run(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two homes work on one site: copies made before a run count as made, copies made during it do not."""
    stream = rig.make()
    rig.add(stream, batch_messages=2)
    rig.publish(stream, numbered(1, 4))
    rig.drain()
    (tmp_path / "twin").mkdir()
    twin = Rig(tmp_path / "twin", rig.source, rig.target, rig.unique, entries=rig.entries)
    shutil.copytree(rig.home / "sites", twin.home / "sites")
    rig.publish(stream, numbered(4, 8))

    def copy_elsewhere(point: Point) -> None:
        if point == Point.COMMITTED:
            monkeypatch.setattr(crash_points, "hook", None)
            twin.drain()

    monkeypatch.setattr(crash_points, "hook", copy_elsewhere)
    assert f"another replicator named {SITE}/{SITE} writes there" in rig.failure()
    rig.drain()
    assert payloads(rig, stream) == [1, 2, 3, 4, 5, 6, 7]


def test_forged_copy_in_the_target_stops_no_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher at the target writes headers of copies between the batches of a run, and before the next run."""
    stream = rig.make()
    rig.add(stream, batch_messages=2)
    rig.publish(stream, numbered(1, 8))
    source = rig.info(stream)
    write = header_writer(SITE, SITE, stream, source.created_ns)
    originals = {message.sequence: message for message in rig.stored(stream)}

    def forge(point: Point = Point.COMMITTED) -> None:
        if point == Point.COMMITTED:
            sequences = [1, 4, 7, 999_999, 2**63 - 1]
            last_ns = source.last_stored_ns or 0
            times = {n: originals[n].stored_ns if n in originals else last_ns for n in sequences}
            forged = [Sent(b"forged", "m", write(b"", n, stored_ns, 5)) for n, stored_ns in times.items()]
            rig.publish(
                stream,
                [*forged, Sent(b"x", "m", b"NATS/1.0\r\nNats-Msg-Id: x/%s/1\r\n\r\n" % (b"1" * 5_000))],
                rig.target,
            )

    monkeypatch.setattr(crash_points, "hook", forge)
    rig.drain()
    monkeypatch.setattr(crash_points, "hook", None)
    forge()
    rig.publish(stream, numbered(8, 10))
    rig.drain()
    rig.drain()
    genuine = [copy.payload for copy in rig.copies(stream) if copy.payload not in (b"forged", b"x")]
    assert sorted(genuine) == [sent.payload for sent in numbered(1, 10)]


@pytest.mark.parametrize("prefixes", (("a", "b"), ("", "")), ids=("own_subjects", "same_subjects"))
def test_older_state_finds_its_copies_on_a_shared_target(rig: Rig, tmp_path: Path, prefixes: tuple[str, str]) -> None:
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
    for site in (SITE, "other"):
        rig.drain(site)
    assert len(rig.copies(target)) == 7 + 7
