"""Reading of a batch's messages from the source, and detection of messages that it no longer holds."""

import bisect
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sr_assets.adapters import wire
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.jetstream import ApiError
from sr_assets.domain.errors import TransientError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, parse_rfc3339_ns

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Generator[T]:
    """Yield items, which are not None, while a thread gets the next one, so that the source works during the sending.

    An error of `items` is raised in its place.
    """
    with ThreadPoolExecutor(1, "fetching") as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def fetch_lane(source: wire.Connection, plan: CopyPlan) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the messages of a plan's range that match its filter, in source order; none is missing.

    Raises TransientError like `fetch`.
    """
    whole = SequenceRange(plan.first, plan.next)
    for messages in wire.read_confirmed(
        source, plan.source_stream, whole, filter_subject=plan.filter, direct=False, held=True
    ):
        _check_source(source, plan)
        yield messages, []


def fetch(source: wire.Connection, plan: CopyPlan, sequences: list[int]) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the messages of ascending sequences in source order, each list with the missing sequences up to its end.

    Consecutive sequences are read as a range, others one by one; the leader supplies messages that a replica lacks.
    Raises TransientError if the source has been recreated or rolled back since the batch was planned.
    """
    whole = SequenceRange(sequences[0], sequences[-1] + 1)
    if len(whole) == len(sequences):
        lists = wire.read_confirmed(
            source, plan.source_stream, whole, filter_subject=plan.filter, direct=plan.direct, held=True
        )
    else:
        lists = wire.read_sequences(source, plan.source_stream, sequences, direct=plan.direct)
    at = 0
    for messages in lists:
        _check_source(source, plan)
        held = [message.sequence for message in messages]
        after = bisect.bisect(sequences, held[-1], at)
        missing = [] if after - at == len(held) else sorted(set(sequences[at:after]).difference(held))
        at = after
        yield messages, missing
    if at < len(sequences):
        _check_source(source, plan)
        yield [], sequences[at:]


def _check_source(source: wire.Connection, plan: CopyPlan) -> None:
    """Raise TransientError if the source was recreated or rolled back since the batch was planned.

    Checked after the messages arrive and before they are used, because such a source holds other messages at their
    sequences. The driver diagnoses the cause.
    """
    if plan.source_sequence is None:
        return
    try:
        info = source.request_api(f"STREAM.INFO.{plan.source_stream}")
    except ApiError:
        changed = True
    else:
        last, last_ns = info["state"]["last_seq"], parse_rfc3339_ns(info["state"]["last_ts"])
        changed = parse_rfc3339_ns(info["created"]) != plan.created_ns or last < plan.source_sequence
        if not changed and (last, last_ns) != (plan.source_sequence, plan.source_ns):
            known = wire.stored_message(source, plan.source_stream, plan.source_sequence)
            changed = known is not None and known.stored_ns != plan.source_ns
    if changed:
        raise TransientError(f"source stream {plan.source_stream} was recreated or rolled back during the copy")
