"""Two entries with one target, an empty source, and batches that end exactly at the end of the source."""

import json
from typing import Any

import pytest

from sr_assets.domain.provenance import Identity, find_copy
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets_tests.rig import SITE, Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h", "inspect_force_field": "force"}


def forced(first: int, after: int) -> list[Sent]:
    bodies = ({"sender": f"n{n % 7}", "force": True, "n": n} for n in range(first, after))
    return [Sent(json.dumps(body).encode()) for body in bodies]


@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "tracked"))
def test_two_entries_share_one_target_across_a_crash(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any]
) -> None:
    first, second, target = rig.make(), rig.make(), rig.unique("T")
    rig.create(target, rig.target)
    for stream in (first, second):
        rig.add(stream, target_stream=target, target_subject_prefix=target, batch_messages=10, **entry)
    # Both sources are still empty.
    rig.drain()
    rig.publish(first, forced(0, 20))
    rig.publish(second, forced(100, 110))
    note_copies = CopyBatch._note_copies

    def crash(batch: CopyBatch, *arguments: Any) -> None:
        if batch._stream.stream == first:
            raise KeyboardInterrupt
        note_copies(batch, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CopyBatch, "_note_copies", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    # Purge the source behind the position, then continue at the same sequences.
    rig.drain()
    rig.api(f"STREAM.PURGE.{first}")
    rig.drain()
    rig.publish(first, forced(20, 30))
    rig.drain()
    for stream, expected in ((first, range(30)), (second, range(100, 110))):
        copies = [copy for copy in rig.copies(target) if find_copy(copy.headers, Identity(stream, SITE, SITE))]
        assert [json.loads(copy.payload)["n"] for copy in copies] == list(expected)
        row = rig.row(f"SELECT * FROM replication WHERE stream = '{stream}'")
        assert (row["copied_messages"], row["seen_messages"], row["lag_messages"]) == (len(expected), len(expected), 0)
    assert rig.rows("gaps") == []
