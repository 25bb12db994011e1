"""Copies as columns: each comes back as it was added, and in the order that is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.stages.replication.copy_columns import Copy, CopyColumns

numbers = st.integers(1, 6)
#: Several of one message among them, at rising places in the target.
copies = st.lists(
    st.tuples(numbers, numbers, numbers, st.sampled_from([None, "a", "é"]), st.none() | numbers), max_size=12
).map(lambda rows: [Copy(place, *row) for place, row in enumerate(rows, 1)])


def columns(added: list[Copy]) -> CopyColumns:
    made = CopyColumns()
    for copy in added:
        made.add(copy)
    return made


@given(copies)
def test_of_several_copies_of_one_message_the_last_stays_in_the_order_of_the_source(added: list[Copy]) -> None:
    found, last = columns(added), {copy.sequence: copy for copy in added}
    found.sort_by_sequence()
    assert list(found) == [last[sequence] for sequence in sorted(last)]
    assert [sequence for sequence in range(8) if sequence in found] == sorted(last)
    assert found.total_bytes == sum(copy.payload_bytes for copy in last.values())
    assert list(found.part(1, 3)) == list(found)[1:3]
    if added:
        assert found.latest == added[-1]


@given(copies, st.lists(numbers))
def test_the_order_of_time_keeps_that_of_the_target_for_one_instant(added: list[Copy], wanted: list[int]) -> None:
    found = columns(added)
    assert list(found.of_sequences(wanted)) == [copy for copy in added if copy.sequence in wanted]
    found.sort_by_time()
    assert list(found) == sorted(added, key=lambda copy: copy.stored_ns)
