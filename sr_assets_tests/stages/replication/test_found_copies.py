"""Found copies on disk: they keep their contents and the requested order, in any number of parts."""

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.stages.replication.target_copies import Copy, FoundCopies

numbers = st.integers(1, 6)
#: Copies at rising target sequences, some of the same message.
copies = st.lists(
    st.tuples(numbers, numbers, numbers, st.sampled_from([None, "a", "é"]), st.none() | numbers), max_size=12
).map(lambda rows: [Copy(target_sequence, *row) for target_sequence, row in enumerate(rows, 1)])


def collect(added: list[Copy]) -> FoundCopies:
    collected = FoundCopies()
    for copy in added:
        collected.add(copy)
    return collected


@given(copies)
def test_sort_by_sequence_keeps_the_last_copy_of_each_message(added: list[Copy]) -> None:
    found_copies, last = collect(added), {copy.sequence: copy for copy in added}
    found_copies.sort_by_sequence()
    assert list(found_copies) == [last[sequence] for sequence in sorted(last)]
    assert [sequence for sequence in range(8) if sequence in found_copies] == sorted(last)
    assert found_copies.total_bytes == sum(copy.payload_bytes for copy in last.values())
    assert list(found_copies.part(1, 3)) == list(found_copies)[1:3]
    if added:
        assert found_copies.latest == added[-1]


@given(copies, st.lists(numbers))
def test_sort_by_time_keeps_target_order_within_one_instant(added: list[Copy], wanted: list[int]) -> None:
    found_copies = collect(added)
    assert list(found_copies.of_sequences(wanted)) == [copy for copy in added if copy.sequence in wanted]
    found_copies.sort_by_time()
    assert list(found_copies) == sorted(added, key=lambda copy: copy.stored_ns)


def test_lookups_find_copies_that_exceed_the_memory_buffer() -> None:
    number = 40_000
    found_copies = FoundCopies()
    for target_sequence in range(1, number + 1):
        # Neighbours are swapped, and every second message is missing.
        found_copies.add(
            Copy(target_sequence, 2 * ((target_sequence - 1) ^ 1) + 2, target_sequence, 1, f"n{target_sequence % 7}")
        )
    found_copies.sort_by_sequence()
    assert (len(found_copies), found_copies.total_bytes, found_copies.latest.target_sequence) == (
        number,
        number,
        number,
    )
    assert [copy.sequence for copy in found_copies] == list(range(2, 2 * number + 1, 2))
    queried = [*range(1, 2 * number + 2, 997), 2 * number]
    assert [sequence in found_copies for sequence in queried] == [sequence % 2 == 0 for sequence in queried]
    assert [found_copies.before(sequence) for sequence in queried] == [(sequence - 1) // 2 for sequence in queried]
    part = found_copies.part(20_001, 30_000)
    assert (part[0].sequence, part[-1].sequence, len(part)) == (40_004, 60_000, 9_999)
    assert [part.before(sequence) for sequence in (1, 40_004, 60_002, 99_999)] == [0, 0, 9_999, 9_999]
