"""Reading the messages of a batch from the source, and finding those that it does not hold (any more).

Not here: how a range is read and confirmed (`wire`), what follows from a missing message (the stages).
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from sr_assets.adapters import wire
from sr_assets.domain.errors import TransientError
from sr_assets.domain.positions import SequenceRange, parse_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.adapters.copying.plan import CopyPlan
    from sr_assets.domain.messages import Message


def fetch(source: wire.Connection, plan: CopyPlan, sequences: list[int]) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the messages of ascending sequences in source order, with the sequences up to there that are missing.

    Consecutive sequences are read as a range, others one by one; messages that a replica does not have are read from the
    leader. Raises TransientError when the source is no longer the one that the plan was made for.
    """
    whole = SequenceRange(sequences[0], sequences[-1] + 1)
    contiguous = len(whole) == len(sequences)
    if contiguous:
        lists = wire.read_confirmed(
            source, plan.source_stream, whole, filter_subject=plan.filter, direct=plan.direct, held=True
        )
    else:
        lists = wire.read_sequences(source, plan.source_stream, sequences, direct=plan.direct)
    at = 0
    for messages in lists:
        plan.check_batch()
        _check_source(source, plan)
        held = [message.sequence for message in messages]
        after = bisect.bisect(sequences, held[-1], at)
        missing = [] if after - at == len(held) else sorted(set(sequences[at:after]).difference(held))
        at = after
        if missing and not contiguous:
            late, missing = _ask_leader(source, plan.source_stream, missing)
            yield sorted([*messages, *late], key=lambda message: message.sequence), missing
        else:
            yield messages, missing
    rest = sequences[at:]
    if rest:
        _check_source(source, plan)
        yield ([], rest) if contiguous else _ask_leader(source, plan.source_stream, rest)


def _check_source(source: wire.Connection, plan: CopyPlan) -> None:
    """Raise TransientError unless the source still is what it was when the batch was planned.

    Asked after the messages have come and before they are used: a source that was made again, or that went back, holds
    other messages at their sequences. The driver finds out what became of it.
    """
    if plan.source_sequence is None:
        return
    info = source.request(source.api(f"STREAM.INFO.{plan.source_stream}"), {})
    changed = "error" in info or parse_rfc3339_ns(info["created"]) != plan.created_ns
    if not changed:
        last, last_ns = info["state"]["last_seq"], parse_rfc3339_ns(info["state"]["last_ts"])
        changed = last < plan.source_sequence
        if not changed and (last, last_ns) != (plan.source_sequence, plan.source_ns):
            known = wire.stored_message(source, plan.source_stream, plan.source_sequence)
            changed = known is not None and known.stored_ns != plan.source_ns
    if changed:
        raise TransientError(f"source stream {plan.source_stream} was made again, or went back, while it was copied")


def _ask_leader(source: wire.Connection, stream: str, sequences: list[int]) -> tuple[list[Message], list[int]]:
    """Return the messages that the leader has, and the sequences that it lacks: any replica may answer a direct get."""
    answers = [(sequence, wire.stored_message(source, stream, sequence)) for sequence in sequences]
    held = [message for _, message in answers if message is not None]
    return held, [sequence for sequence, message in answers if message is None]
