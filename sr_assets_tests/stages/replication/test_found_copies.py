"""Copies in a file: each comes back as it was added, and in the order that is asked for, however many parts it has."""

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.stages.replication.found_copies import Copy, FoundCopies

numbers = st.integers(1, 6)
#: Several of one message among them, at rising places in the target.
copies = st.lists(
    st.tuples(numbers, numbers, numbers, st.sampled_from([None, "a", "é"]), st.none() | numbers), max_size=12
).map(lambda rows: [Copy(place, *row) for place, row in enumerate(rows, 1)])


def columns(added: list[Copy]) -> FoundCopies:
    made = FoundCopies()
    for copy in added:
        made.add(copy)
    return made


@given(copies)
def test_of_several_copies_of_one_message_the_last_stays_in_the_order_of_the_source(added: list[Copy]) -> None:
    found_copies, last = columns(added), {copy.sequence: copy for copy in added}
    found_copies.sort_by_sequence()
    assert list(found_copies) == [last[sequence] for sequence in sorted(last)]
    assert [sequence for sequence in range(8) if sequence in found_copies] == sorted(last)
    assert found_copies.total_bytes == sum(copy.payload_bytes for copy in last.values())
    assert list(found_copies.part(1, 3)) == list(found_copies)[1:3]
    if added:
        assert found_copies.latest == added[-1]


@given(copies, st.lists(numbers))
def test_the_order_of_time_keeps_that_of_the_target_for_one_instant(added: list[Copy], wanted: list[int]) -> None:
    found_copies = columns(added)
    assert list(found_copies.of_sequences(wanted)) == [copy for copy in added if copy.sequence in wanted]
    found_copies.sort_by_time()
    assert list(found_copies) == sorted(added, key=lambda copy: copy.stored_ns)


def test_more_copies_than_are_held_in_memory_are_found_again() -> None:
    number = 40_000
    found_copies = FoundCopies()
    for place in range(1, number + 1):
        # Neighbours stand the other way round, and every second message is missing.
        found_copies.add(Copy(place, 2 * ((place - 1) ^ 1) + 2, place, 1, f"n{place % 7}"))
    found_copies.sort_by_sequence()
    assert (len(found_copies), found_copies.total_bytes, found_copies.latest.target_sequence) == (
        number,
        number,
        number,
    )
    assert [copy.sequence for copy in found_copies] == list(range(2, 2 * number + 1, 2))
    asked = [*range(1, 2 * number + 2, 997), 2 * number]
    assert [sequence in found_copies for sequence in asked] == [sequence % 2 == 0 for sequence in asked]
    assert [found_copies.before(sequence) for sequence in asked] == [(sequence - 1) // 2 for sequence in asked]
    part = found_copies.part(20_001, 30_000)
    assert (part[0].sequence, part[-1].sequence, len(part)) == (40_004, 60_000, 9_999)
    assert [part.before(sequence) for sequence in (1, 40_004, 60_002, 99_999)] == [0, 0, 9_999, 9_999]
