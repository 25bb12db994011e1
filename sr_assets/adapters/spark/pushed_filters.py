"""The filters of a query that narrow a read: a range of sequences or times, and a subject."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from sr_assets.adapters.spark.stream_options import Bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql.datasource import Filter

#: A server's clock may step back by less than this between two messages without hiding one from a filter by time.
_STEP_BACK_NS: Final = 60 * 10**9
_END: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Pushed:
    """The half-open range of sequences, the bounds by time, and a subject filter; each may include more rows."""

    first: int = 1
    next: int = _END
    since: Bound | None = None
    until: Bound | None = None
    subject: str | None = None


def pushed(filters: Iterable[Filter]) -> Pushed:
    """Return what a read may leave out by the filters, which all apply."""
    narrowed = Pushed()
    for each in filters:
        match each:
            case EqualTo(("subject",), str(subject)) if _is_literal(subject):
                narrowed = replace(narrowed, subject=subject)
            case StringStartsWith(("subject",), str(prefix)) if not narrowed.subject and _is_literal(prefix[:-1]):
                narrowed = replace(narrowed, subject=f"{prefix}>" if prefix.endswith(".") else None)
            case EqualTo(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, value, value + 1)
            case GreaterThan(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, value + 1, _END)
            case GreaterThanOrEqual(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, value, _END)
            case LessThan(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, 1, value)
            case LessThanOrEqual(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, 1, value + 1)
            case GreaterThan(("stored_at",), datetime() as time) | GreaterThanOrEqual(
                ("stored_at",), datetime() as time
            ):
                narrowed = replace(narrowed, since=Bound(time_ns=_unix_ns(time) - _STEP_BACK_NS))
            case LessThan(("stored_at",), datetime() as time) | LessThanOrEqual(("stored_at",), datetime() as time):
                narrowed = replace(narrowed, until=Bound(time_ns=_unix_ns(time) + _STEP_BACK_NS))
    return narrowed


def _narrowed(narrowed: Pushed, first: int, after: int) -> Pushed:
    return replace(narrowed, first=max(narrowed.first, first), next=min(narrowed.next, after))


def _is_literal(subject: str) -> bool:
    """Return whether a text is a subject without wildcards, which the server accepts as a filter."""
    tokens = subject.split(".")
    return all(token and not set(token) & set("*> \t\r\n") for token in tokens)


def _unix_ns(time: Any) -> int:
    """Return a time in unix ns; Spark's times without a zone are UTC."""
    moment = time if time.tzinfo else time.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1e6) * 1000
