"""The account of a batch's copies."""

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.copying.receipt import Receipt


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 5)), max_size=8))
def test_receipt_locates_run_like_its_single_copies(runs: list[tuple[int, int, int]]) -> None:
    whole, single, target_sequence = Receipt(), Receipt(), 0
    for gap, sequence, copies in runs:
        target_sequence += gap
        whole.locate(target_sequence, sequence, copies)
        for index in range(copies):
            single.locate(target_sequence + index, sequence + index)
        target_sequence += copies
    assert whole == single
