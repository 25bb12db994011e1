"""The Parquet history: staging a batch, moving its files to their days, and retention."""

import base64
import gzip
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from sr_assets.adapters.published.history import (
    StagedFiles,
    place_staged,
    remove_before,
    snapshot_rows,
    stream_folder,
)
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.registration import FILE_PROTOCOL
from sr_assets_tests.examples import one_in

DAY_NS = 86_400 * 10**9


def message(sequence: int, *, day: int = 0) -> Message:
    return Message(sequence, day * DAY_NS + sequence, "a.b", b"", b'{"n": %d}' % sequence)


def stage(folder: Path, partition: int, *messages: Message) -> None:
    with StagedFiles(folder, partition) as staged:
        staged.add(messages, {stored.sequence: f"n{stored.sequence}" for stored in messages})


def sequences(file: Path) -> list[int]:
    return [int(sequence) for sequence in parquet.read_table(file, partitioning=None)["sequence"].to_pylist()]


def test_row_has_json_as_text_and_other_payloads_as_bytes() -> None:
    ((table, refused),) = snapshot_rows(
        [message(1), Message(2, 1_999, "s.\udcff", b"", b"\xff"), Message(3, 0, "s", b"", b'"\\ud800"')],
        {1: "a", 2: "b", 3: "c"},
    )
    rows = table.to_pylist()
    assert refused == 0
    assert [row["payload"] for row in rows] == ['{"n": 1}', None, None]
    assert [row["payload_raw"] for row in rows] == [None, b"\xff", b'"\\ud800"']
    assert [row["payload_bytes"] for row in rows] == [8, 1, 8]
    assert rows[1]["subject"] == "s.\ufffd"
    assert rows[1]["stored_at"].microsecond == 1


def registration(content: bytes) -> bytes:
    packed = base64.b64encode(gzip.compress(content, 9)).decode()
    data = json.dumps({"protocol": FILE_PROTOCOL, "zcontent": packed})
    return json.dumps({"protocol": "choria:adapters:jetstream:output:1", "data": data}).encode()


@one_in(10)
@given(
    st.lists(
        st.builds(
            lambda letter, size: registration(letter * size), st.sampled_from([b"\0", b"a"]), st.integers(0, 2 << 20)
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 3),
)
def test_decoded_bytes_of_a_batch_are_bounded_by_its_payloads(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], days: int
) -> None:
    folder = tmp_path_factory.mktemp("staging")
    messages = [Message(n, n % days * DAY_NS, "s", b"", payload) for n, payload in enumerate(payloads)]
    with StagedFiles(folder, 0) as staged:
        staged.add(messages, dict.fromkeys(range(len(messages)), "a"))
    groups = [
        parquet.ParquetFile(file).read_row_group(number)
        for file in folder.glob("date=*/0.parquet")
        for number in range(parquet.read_metadata(file).num_row_groups)
    ]
    assert sum(map(len, groups)) == len(messages)
    # The metadata of one message, and the two copies of its payload, may follow eight megabytes.
    assert max(rows.nbytes for rows in groups) <= (10 << 20) + 2 * max(map(len, payloads))
    assert sum(rows.nbytes for rows in groups) <= 202 * sum(map(len, payloads)) + 1_000 * len(payloads)
    assert staged.refused == sum(rows["metadata"].null_count for rows in groups)


def test_place_staged_moves_files_to_their_days(tmp_path: Path) -> None:
    staging, folder = tmp_path / "staging", stream_folder(tmp_path, "LON/DON", "S")
    stage(staging, 0, message(1), message(3), message(5, day=1))
    stage(staging, 1, message(2), message(4, day=1))
    files = place_staged(staging, folder, SequenceRange(1, 9))
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        f"snapshots/name=LON%2FDON/stream=S/date=1970-01-0{day}/1-9.parquet" for day in (1, 2)
    ]
    assert [sorted(sequences(file)) for file in files] == [[1, 2, 3], [4, 5]]
    assert not staging.exists()
    # After a crash before the commit, the second call finds the same files.
    assert place_staged(staging, folder, SequenceRange(1, 9)) == files


def test_failed_task_leaves_no_staged_file(tmp_path: Path) -> None:
    def fail() -> None:
        with StagedFiles(tmp_path / "staging", 0) as staged:
            staged.add([message(1)], {1: "a"})
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert place_staged(tmp_path / "staging", tmp_path / "s", SequenceRange(1, 2)) == []


def test_unwritable_folder_is_reported_and_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "staging").write_text("a file")
    with pytest.raises(OSError, match="staging"):
        stage(tmp_path / "staging", 0, message(1), message(2, day=1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


def test_repeated_batch_replaces_its_own_file(tmp_path: Path) -> None:
    for numbers in ((1, 2), (1, 2, 3)):
        stage(tmp_path / "staging", 0, *map(message, numbers))
        (file,) = place_staged(tmp_path / "staging", tmp_path / "s", SequenceRange(1, 4))
    assert sequences(file) == [1, 2, 3]


def test_remove_before_deletes_older_days(tmp_path: Path) -> None:
    for day in (0, 1, 2):
        stage(tmp_path / "staging", 0, message(day + 1, day=day))
        place_staged(tmp_path / "staging", tmp_path / "s", SequenceRange(day + 1, day + 2))
    assert remove_before(tmp_path / "s", "1970-01-03") == 2
    assert [day.name for day in (tmp_path / "s").iterdir()] == ["date=1970-01-03"]
