"""The messages read from a source before and after its rollbacks, from its contents and the runs' logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from sr_assets.domain.positions import parse_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sr_assets_tests.reference import Seen

_TIME = r"(\d\S+Z)"
_BEGUN = re.compile(
    r": source stream (\S+) .* continuing at 1 as restart (\d+) \(recopy\);"
    rf" last message read (\d+), stored (never|{_TIME}); silence known until (never|{_TIME})"
)
_BLIND = re.compile(rf"/(\S+): messages of the time from {_TIME} to {_TIME} were lost before they were read")

#: Blind time that ends with a stream info's clock may end behind a message that the info did not know of yet.
_MARGIN_NS = 10**9


@dataclass(frozen=True, slots=True)
class Beginning:
    """A stream was begun again: the last message read before, 0 for none, and up to when everything was known."""

    sequence: int
    stored_ns: int
    known_ns: int


@dataclass(frozen=True, slots=True)
class Past:
    """What a stream held each time before its store was put back, how often it was begun again, which time is blind."""

    held: Sequence[Sequence[Seen]] = ()
    beginnings: Sequence[Beginning] = ()
    blind: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, stream: str, held: Sequence[Sequence[Seen]], log: str) -> Self:
        """Take from a log what the runs said of a stream; a run that was killed before its commit said it for nothing."""
        begun = {
            int(match[2]): Beginning(
                int(match[3]), *(parse_rfc3339_ns(match[time]) if match[time] else 0 for time in (5, 7))
            )
            for match in _BEGUN.finditer(log)
            if match[1] == stream
        }
        assert sorted(begun) == list(range(1, len(begun) + 1)), f"{stream} was begun again {sorted(begun)}"
        blind = {
            parse_rfc3339_ns(match[2]): parse_rfc3339_ns(match[3])
            for match in _BLIND.finditer(log)
            if match[1] == stream
        }
        return cls(held, [begun[number] for number in sorted(begun)], list(blind.items()))

    @property
    def known_ns(self) -> list[int]:
        """Up to when everything was known, each time the stream was begun again."""
        return [beginning.known_ns for beginning in self.beginnings]

    def read(self, now: Sequence[Seen]) -> list[Seen]:
        """Return what was read, in order: before each beginning, then of what the source holds now."""
        read = [
            replace(message, beginning=number)
            for number, beginning in enumerate(self.beginnings)
            for message in self._source_of(beginning)[: beginning.sequence]
        ]
        return [*read, *(replace(message, beginning=len(self.beginnings)) for message in now)]

    def unread(self, now: Sequence[Seen]) -> list[Seen]:
        """Return what the source lost before it was read, each with the beginning before which that was."""
        sources = [self._source_of(beginning) for beginning in self.beginnings]
        kept = {
            (message.sequence, message.stored_ns)
            for source, end in zip(
                [*sources[1:], now], [beginning.sequence for beginning in self.beginnings[1:]] + [len(now)], strict=True
            )
            for message in source[:end]
        }
        return [
            replace(message, beginning=number)
            for number, (source, beginning) in enumerate(zip(sources, self.beginnings, strict=True))
            for message in source[beginning.sequence :]
            if (message.sequence, message.stored_ns) not in kept
        ]

    def beyond(self) -> list[Seen]:
        """Return what the source held behind what counted as read, each with the beginning before which that was.

        A batch of a stream that is not tracked may have copied of it, also what was put back and is copied again.
        """
        return [
            replace(message, beginning=number)
            for number, beginning in enumerate(self.beginnings)
            for message in self._source_of(beginning)[beginning.sequence :]
        ]

    def misjudged(self, now: Sequence[Seen]) -> Iterator[str]:
        """Yield what makes the blind time wrong: lost messages outside of it, messages inside that were read."""
        for message in self.unread(now):
            if not any(since <= message.stored_ns <= until for since, until in self.blind):
                yield f"{message.subject} {message.sequence}, stored {message.stored_ns}, was lost unread, not in blind time"
        for message in self.read(now):
            if any(since < message.stored_ns < until - _MARGIN_NS for since, until in self.blind):
                yield f"{message.subject} {message.sequence}, stored {message.stored_ns}, was read, in blind time"

    def _source_of(self, beginning: Beginning) -> Sequence[Seen]:
        """Return what the source held when a message of it was read: no message that it stored since has the same time."""
        if not beginning.sequence:
            return ()
        place = beginning.sequence - 1
        for held in self.held:
            if place < len(held) and held[place].stored_ns == beginning.stored_ns:
                return held
        raise AssertionError(f"the source never held message {beginning.sequence} stored {beginning.stored_ns}")
