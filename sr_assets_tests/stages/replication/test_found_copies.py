"""Found copies: they keep their contents and the requested order, in any number of parts."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.state.store import SiteState
from sr_assets.stages.replication import found_copies
from sr_assets.stages.replication.found_copies import Copy, FoundCopies
from sr_assets_tests.examples import one_in

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


@one_in(5)
@given(copies)
def test_sort_by_sequence_keeps_the_last_copy_of_each_message(added: list[Copy]) -> None:
    collected, last = collect(added), {copy.sequence: copy for copy in added}
    collected.sort_by_sequence()
    assert list(collected) == [last[sequence] for sequence in sorted(last)]
    assert [copy.sequence for copy in collected.of_sequences(range(8))] == sorted(last)
    assert collected.total_bytes == sum(copy.payload_bytes for copy in last.values())
    assert list(collected.part(1, 3)) == list(collected)[1:3]
    if added:
        assert collected.latest == added[-1]


@one_in(5)
@given(copies, st.lists(numbers))
def test_sort_by_time_keeps_target_order_within_one_instant(added: list[Copy], wanted: list[int]) -> None:
    collected = collect(added)
    assert list(collected.of_sequences(wanted)) == [copy for copy in added if copy.sequence in wanted]
    collected.sort_by_time()
    assert list(collected) == sorted(added, key=lambda copy: copy.stored_ns)


def test_lookups_find_copies_that_exceed_the_memory_buffer() -> None:
    number = 120_000
    collected = FoundCopies()
    for target_sequence in range(1, number + 1):
        # Neighbours are swapped, and every second message is missing.
        collected.add(
            Copy(target_sequence, 2 * ((target_sequence - 1) ^ 1) + 2, target_sequence, 1, f"n{target_sequence % 7}")
        )
    collected.sort_by_sequence()
    assert (len(collected), collected.total_bytes, collected.latest.target_sequence) == (
        number,
        number,
        number,
    )
    assert [copy.sequence for copy in collected] == list(range(2, 2 * number + 1, 2))
    queried = [*range(1, 2 * number + 2, 997), 2 * number]
    held = {copy.sequence for copy in collected.of_sequences(queried)}
    assert held == {sequence for sequence in queried if sequence % 2 == 0}
    assert [collected.before(sequence) for sequence in queried] == [(sequence - 1) // 2 for sequence in queried]
    part = collected.part(20_001, 30_000)
    assert (part[0].sequence, part[-1].sequence, len(part)) == (40_004, 60_000, 9_999)
    assert [part.before(sequence) for sequence in (1, 40_004, 60_002, 99_999)] == [0, 0, 9_999, 9_999]


@one_in(10)
@given(
    logged=st.dictionaries(st.integers(1, 40), st.integers(1, 60), max_size=30),
    changed=st.dictionaries(st.integers(1, 40), st.integers(1, 60), max_size=8),
    end=st.integers(0, 40),
)
def test_comparison_finds_the_last_kept_and_all_lost_copies(
    logged: dict[int, int], changed: dict[int, int], end: int
) -> None:
    """The target holds the logged copies up to its end, except some that are other messages now."""
    held = {at: sequence for at, sequence in (logged | changed).items() if at <= end}
    with TemporaryDirectory() as folder, SiteState(Path(folder)) as state, pytest.MonkeyPatch.context() as patch:
        patch.setattr(found_copies, "PORTION", 3)
        state.copy_log("S").add([(at, sequence, 1) for at, sequence in logged.items()], now_ns=0)
        copies = collect([Copy(at, sequence, 1, 1, None) for at, sequence in held.items()])
        copies.read_log(state.connection, "S")
        kept = [(at, sequence) for at, sequence in sorted(logged.items()) if held.get(at) == sequence]
        last = copies.last_logged()
        assert (last and (last.target_sequence, last.sequence)) == (kept[-1] if kept else None)
        after = [copy for copy in sorted(logged.items()) if copy[0] > end]
        assert copies.first_logged_after(end) == (after[0] if after else None)
        portions = [part.tolist() for part in copies.lost(end + 1)]
        lost = {sequence for at, sequence in logged.items() if at > end} - set(held.values())
        assert {sequence for part in portions for sequence in part} == lost
        assert all(len(part) <= 3 for part in portions)
