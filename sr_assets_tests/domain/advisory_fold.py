"""The advisory fold of `domain.received` in Python, the reference for the centre's SQL statements."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sr_assets.domain.received import RANK, Advisory

Key = tuple[str, str, str, str]


class Standing(NamedTuple):
    """A node's values from its highest-ranking advisory."""

    epoch_ns: int
    transition: int
    event_ns: int
    event_code: int
    seen_ns: int | None
    origin: str
    received_ns: int


def fold(view: Mapping[Key, Standing], received: Iterable[tuple[Advisory, int]]) -> dict[Key, Standing]:
    """Return the view after advisories, each with the time (unix ns) at which the centre's stream stored it."""
    after = dict(view)
    for advisory, received_ns in received:
        key = (advisory.replicator, advisory.name, advisory.stream, advisory.node)
        fields = {**advisory._asdict(), "received_ns": received_ns}
        standing = Standing(*(fields[name] for name in Standing._fields))
        current = after.get(key)
        if current is None or rank(standing) > rank(current):
            after[key] = standing
    return after


def rank(standing: Standing) -> tuple[object, ...]:
    """Return the compared values in the order of `RANK`."""
    seen_ns = -1 if standing.seen_ns is None else standing.seen_ns
    compared = {**standing._asdict(), "seen_ns": seen_ns, "received_ns": -standing.received_ns}
    return tuple(compared[name] for name in RANK)
