"""The survey of a range: from parts that know nothing of each other, the same blind spans as from the whole range."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.arrow_rows import arrow_schema, rows_of
from sr_assets.domain.blindness import CLOCK_AHEAD, BlindSpans, find_blind_spans
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, SequenceRange, missing
from sr_assets.domain.tracking.columns import credible_times
from sr_assets.domain.tracking.replaying import STRETCH, Survey, survey_part

HOUR = CLOCK_TOLERANCE_NS
UNTIL_NS = 100 * HOUR

#: Sequences with times in hours: mostly ascending, sometimes before an earlier one, or far ahead.
MESSAGES = st.dictionaries(st.integers(1, 60), st.integers(0, 99) | st.integers(102, 130), min_size=1, max_size=40)


def survey(messages: dict[int, int], firsts: list[int], lost: list[int] | None) -> Survey:
    """Survey the parts that begin at `firsts`, as tasks do."""
    before = [-1] * len(firsts)
    while True:
        batches = []
        for number, (first, after) in enumerate(zip(firsts, [*firsts[1:], 61], strict=True)):
            own = {sequence: ns for sequence, ns in sorted(messages.items()) if first <= sequence < after}
            if own:
                sequence, stored_ns = (np.array([*each], np.int64) for each in (own.keys(), own.values()))
                deleted = None if lost is None else np.array(lost, np.int64)
                columns = survey_part(number, sequence, stored_ns, before[number], UNTIL_NS, deleted)
                batches.append(rows_of(STRETCH, columns))
        surveyed = Survey(pa.Table.from_batches(batches, arrow_schema(STRETCH)))
        if surveyed.latest_before(len(firsts)) == before:
            return surveyed
        before = surveyed.latest_before(len(firsts))


@given(MESSAGES, st.sets(st.integers(2, 60), max_size=5), st.booleans())
def test_survey_of_parts_finds_the_spans_of_the_whole_range(
    hours: dict[int, int], cuts: set[int], filtered: bool
) -> None:
    messages = {sequence: hour * HOUR for sequence, hour in sorted(hours.items())}
    covered = SequenceRange(1, 61)
    # With a filter, the server lists the deleted sequences, here every third absent one.
    absent = [number for part in missing(covered, messages) for number in range(part.first, part.next)]
    lost = absent[::3] if filtered else absent
    surveyed = survey(messages, [1, *sorted(cuts)], lost if filtered else None)
    holes: list[tuple[SequenceRange, str]] = [(SequenceRange(number, number + 1), "deleted") for number in lost]
    assert {number for part in surveyed.absent(covered) for number in range(part.first, part.next)} >= set(lost)

    stored_ns = np.array([*messages.values()], np.int64)
    times_ns, ahead = credible_times(stored_ns, None, UNTIL_NS)
    sequences: list[Any] = [*messages]
    unclear = [
        (SequenceRange(number, number + 1), CLOCK_AHEAD)
        for number, is_ahead in zip(sequences, ahead, strict=True)
        if is_ahead
    ]
    timed = [(number, ns) for number, ns, is_ahead in zip(sequences, stored_ns, ahead, strict=True) if not is_ahead]
    spans, _ = find_blind_spans(
        [*holes, *unclear],
        [number for number, _ in timed],
        [int(ns) for _, ns in timed],
        before_ns=None,
        after_hole=False,
        until_ns=UNTIL_NS,
    )
    assert BlindSpans(tuple(surveyed.blind_spans(holes, UNTIL_NS))) == BlindSpans(tuple(spans))

    latest_ns = np.maximum.accumulate(np.where(ahead, 0, stored_ns))
    assert bool(surveyed.unclear_times()) == bool(ahead.any() or (latest_ns - stored_ns > HOUR).any())

    first, after, at_ns = surveyed.times_ahead
    replaced = {
        number: int(at)
        for begin, end, at in zip(first, after, at_ns, strict=True)
        for number in range(begin, end)
        if number in messages
    }
    assert timed == [] or replaced == {
        number: int(ns) for number, ns, is_ahead in zip(sequences, times_ns, ahead, strict=True) if is_ahead
    }
