"""The policies of a stream's classes, for single nodes and as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.domain.tracking.rules import Event, Policy, Transition

if TYPE_CHECKING:
    Integers = np.ndarray[tuple[int], np.dtype[np.int64]]

T = TypeVar("T")

#: The code of a node without a class: the last item of the limits.
NO_CLASS: Final = -1


class Limits(NamedTuple):
    """The limits of many senders, one row each, named as in `Policy`."""

    warning_ns: Integers
    interval_ns: Integers
    due_ns: Integers

    def take(self, which: Integers) -> Limits:
        """Return a selection of the rows."""
        return Limits(*(column[which] for column in self))


def class_of(event: Transition, before: T, now: T) -> T:
    """Return the class of a transition at a message: the sender's class before it, or the message's.

    `timeout` and `expire` belong to the silence before the message.
    """
    return before if event.event in (Event.TIMEOUT, Event.EXPIRE) else now


@dataclass(frozen=True)
class ClassPolicies:
    """The stream's own policy, and one of each class. A code is the position of a class, or `NO_CLASS`."""

    own: Policy
    names: tuple[str, ...]
    policies: tuple[Policy, ...]
    _limits: Limits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the columns once."""
        policies = (*self.policies, self.own)
        limits = (np.array([getattr(policy, name) for policy in policies], np.int64) for name in Limits._fields)
        object.__setattr__(self, "_limits", Limits(*limits))

    def of(self, code: int) -> Policy:
        return self.own if code == NO_CLASS else self.policies[code]

    def limits(self, codes: Integers) -> Limits:
        """Return the limits of many senders by the codes of their classes."""
        return self._limits.take(codes)

    def codes(self, names: pa.ChunkedArray | pa.Array) -> Integers:
        """Return the codes of classes; a class that is no longer configured is none."""
        codes: Integers = pc.fill_null(pc.index_in(names, pa.array(self.names)), NO_CLASS).to_numpy().astype(np.int64)
        return codes

    def column(self, codes: Integers) -> pa.Array:
        """Return the names of classes; null for none."""
        return pa.array(self.names).take(pa.array(codes, mask=codes == NO_CLASS))
