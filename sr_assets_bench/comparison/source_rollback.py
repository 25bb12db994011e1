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

#: Blind time that ends with a stream info's clock may end after a message that the info did not include.
_MARGIN_NS = 10**9


@dataclass(frozen=True, slots=True)
class Beginning:
    """A restart of a stream: the last message read before it (0 for none), and the time until which all was known."""

    sequence: int
    stored_ns: int
    known_ns: int


@dataclass(frozen=True, slots=True)
class Past:
    """A stream's contents before each rollback, its restarts, its blind time, and when it was created before each rollback.

    Without the last, it is the same stream.
    """

    held: Sequence[Sequence[Seen]] = ()
    beginnings: Sequence[Beginning] = ()
    blind: Sequence[tuple[int, int]] = ()
    created: Sequence[int] = ()

    @classmethod
    def of(cls, stream: str, held: Sequence[Sequence[Seen]], log: str, created: Sequence[int] = ()) -> Self:
        """Read the restarts of a stream from a log; a run that was killed before its commit has no effect."""
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
        return cls(held, [begun[number] for number in sorted(begun)], list(blind.items()), created)

    @property
    def known_ns(self) -> list[int]:
        """The times until which all was known, one per restart."""
        return [beginning.known_ns for beginning in self.beginnings]

    def read(self, now: Sequence[Seen]) -> list[Seen]:
        """Return the messages read, in order: before each restart, then from the source's current contents."""
        read = [
            replace(message, beginning=number)
            for number, beginning in enumerate(self.beginnings)
            for message in self._source_of(number)[: beginning.sequence]
        ]
        return [*read, *(replace(message, beginning=len(self.beginnings)) for message in now)]

    def unread(self, now: Sequence[Seen]) -> list[Seen]:
        """Return the messages that the source lost before they were ever read, each with the restart that followed."""
        sources = [self._source_of(number) for number in range(len(self.beginnings))]
        read = {(message.sequence, message.stored_ns) for message in self.read(now)}
        return [
            replace(message, beginning=number)
            for number, (source, beginning) in enumerate(zip(sources, self.beginnings, strict=True))
            for message in source[beginning.sequence :]
            if (message.sequence, message.stored_ns) not in read
        ]

    def beyond(self, now_ns: int) -> Iterator[tuple[int, Seen]]:
        """Yield the messages that the source held after the last one read, each with the restart that followed.

        Before it comes when the source was created: `now_ns`, unless it was created again. A batch of an untracked stream
        may have copied some of them, including restored messages that are copied again.
        """
        for number, (beginning, known) in enumerate(zip(self.beginnings, self._places(), strict=True)):
            # Before the first commit, the batch may have read any of the sources.
            for place in range(len(self.held)) if known is None else [known]:
                created_ns = self.created[place] if self.created else now_ns
                for message in self.held[place][beginning.sequence :]:
                    yield created_ns, replace(message, beginning=number)

    def misjudged(self, now: Sequence[Seen]) -> Iterator[str]:
        """Yield the errors of the blind time: lost messages outside it, and messages inside it that were read."""
        for message in self.unread(now):
            if not any(since <= message.stored_ns <= until for since, until in self.blind):
                yield f"{message.subject} {message.sequence}, stored {message.stored_ns}, was lost unread, not in blind time"
        for message in self.read(now):
            if any(since < message.stored_ns < until - _MARGIN_NS for since, until in self.blind):
                yield f"{message.subject} {message.sequence}, stored {message.stored_ns}, was read, in blind time"

    def created_ns(self, beginning: int, now_ns: int) -> int:
        """Return when the stream was created that was read before a restart by its number, or after the last: `now_ns`."""
        if not self.created or beginning == len(self.beginnings):
            return now_ns
        place = self._places()[beginning]
        assert place is not None, f"nothing was read before restart {beginning + 1}"
        return self.created[place]

    def _source_of(self, beginning: int) -> Sequence[Seen]:
        place = self._places()[beginning]
        return () if place is None else self.held[place]

    def _places(self) -> list[int | None]:
        """Return which source was read before each restart: one after that of the restart before; None if nothing was read."""
        places, first = list[int | None](), 0
        for beginning in self.beginnings:
            place = self._place_of(beginning, first) if beginning.sequence else None
            places.append(place)
            first = (first if place is None else place) + 1
        return places

    def _place_of(self, beginning: Beginning, first: int) -> int:
        """Return the first source from a place on that held a message with a sequence and a stored time."""
        index = beginning.sequence - 1
        for place, held in enumerate(self.held[first:], first):
            if index < len(held) and held[index].stored_ns == beginning.stored_ns:
                return place
        raise AssertionError(f"the source never held message {beginning.sequence} stored {beginning.stored_ns}")
