"""Messages that end their process: a batch is made in smaller parts until each such message is alone and set aside."""

from typing import Any

import pytest

from sr_assets.adapters.copying.copier import Sender
from sr_assets.adapters.published import history
from sr_assets.adapters.wire import Outgoings
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import last_origin
from sr_assets.domain.registration import Decoded, decode_payload
from sr_assets.stages.replication import batch
from sr_assets_tests.rig import Rig, Sent

TRACKED = {"inspect_subject_token": 2, "inspect_duration": "1h"}
MESSAGES = 20


class KilledError(BaseException):
    """The end of the process: nothing of this project handles it."""


def publish(rig: Rig, fatal: set[int], **entry: Any) -> str:
    """Publish messages, some of them fatal, and add the stream."""
    stream = rig.make()
    rig.publish(stream, [Sent(b"fatal" if n in fatal else b"%d" % n, f"n{n}") for n in range(1, MESSAGES + 1)])
    rig.add(stream, **entry)
    return stream


def kill_before_sending(patch: pytest.MonkeyPatch) -> None:
    """Let the process end before a fatal message is sent."""
    take = Sender.take

    def take_or_die(self: Sender, most: int, free_bytes: int) -> Outgoings:
        taken = take(self, most, free_bytes)
        if b"fatal" in taken.payloads:
            raise KilledError
        return taken

    patch.setattr(Sender, "take", take_or_die)


def kill_while_staging(patch: pytest.MonkeyPatch) -> None:
    """Let the process end after a fatal message was sent, while its row is made."""

    def decode_or_die(payload: bytes, most_bytes: int) -> Decoded:
        if payload == b"fatal":
            raise KilledError
        return decode_payload(payload, most_bytes)

    patch.setattr(history, "decode_payload", decode_or_die)


def run_until_done(rig: Rig, most: int) -> int:
    """Run the site until a run survives; return how many were killed."""
    for killed in range(most):
        try:
            reports = rig.run()
        except KilledError:
            continue
        assert not [report.failure for report in reports.values() if report.failure]
        return killed
    pytest.fail(f"the stream has not ended after {most} runs")


def copied(rig: Rig, stream: str) -> list[int]:
    origins = [last_origin(copy.headers) for copy in rig.copies(stream)]
    return [origin.sequence for origin in origins if origin]


@pytest.mark.parametrize(
    ("entry", "fatal"),
    (pytest.param(TRACKED, {13, 14}, id="tracked"), pytest.param({}, {13}, id="plain", marks=pytest.mark.nightly)),
)
def test_fatal_message_is_parked_and_the_others_copied_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], fatal: set[int]
) -> None:
    stream = publish(rig, fatal, **entry)
    monkeypatch.setattr(batch, "_ALONE_ATTEMPTS", 2)
    kill_before_sending(monkeypatch)
    run_until_done(rig, 20 * len(fatal))
    assert copied(rig, stream) == [n for n in range(1, MESSAGES + 1) if n not in fatal]
    parked = rig.rows("SELECT sequence, reason FROM parked_messages ORDER BY sequence")
    assert [row["sequence"] for row in parked] == sorted(fatal)
    assert all("the process ended 2 times" in row["reason"] for row in parked)
    row = rig.row("replication")
    counts = (row["seen_messages"], row["copied_messages"], row["parked_messages"], row["gap_messages"])
    assert counts == (MESSAGES, MESSAGES - len(fatal), len(fatal), 0)


def test_message_fatal_to_the_history_is_copied_without_a_row(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = publish(rig, {13}, **TRACKED)
    monkeypatch.setattr(batch, "_ALONE_ATTEMPTS", 1)
    kill_while_staging(monkeypatch)
    run_until_done(rig, 20)
    assert copied(rig, stream) == list(range(1, MESSAGES + 1))
    rows = rig.rows("SELECT sequence FROM node_snapshot_history ORDER BY sequence")
    assert [row["sequence"] for row in rows] == [n for n in range(1, MESSAGES + 1) if n != 13]
    row = rig.row("replication")
    assert (row["copied_messages"], row["parked_messages"]) == (MESSAGES, 0)


def test_fatal_message_stops_the_stream_when_poison_must(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = publish(rig, {13}, on_poison="stop")
    kill_before_sending(monkeypatch)
    failure = ""
    for _ in range(20):
        try:
            failure = rig.failure()
        except KilledError:
            continue
        break
    assert "message 13 cannot be copied: the process ended 5 times" in failure
    assert copied(rig, stream) == list(range(1, 13))


def test_attempts_that_end_in_order_never_park_a_message(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is away for many runs, with an operator's kill now and then."""
    stream = publish(rig, set())
    take, runs = Sender.take, 0

    def refuse(self: Sender, most: int, free_bytes: int) -> Outgoings:
        taken = take(self, most, free_bytes)
        if max(taken.sequences, default=0) < 14:
            return taken
        raise KilledError if runs % 4 == 0 else RunError("the target is away")

    monkeypatch.setattr(Sender, "take", refuse)
    for runs in range(9):  # noqa: B007  `refuse` reads it
        try:
            assert "the target is away" in rig.failure()
        except KilledError:
            continue
    monkeypatch.setattr(Sender, "take", take)
    rig.drain()
    assert copied(rig, stream) == list(range(1, MESSAGES + 1))
    assert not rig.rows("parked_messages")
