"""The policies of a stream's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from sr_assets.domain.tracking.rules import Event, Policy, Transition

T = TypeVar("T")

#: The code of a node without a class.
NO_CLASS: Final = -1


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

    def of(self, code: int) -> Policy:
        return self.own if code == NO_CLASS else self.policies[code]
