"""The result of a batch's copies: the receipt of one writer, or of all of them added up.

Not here: what a commit writes from it (`stages.replication`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from pathlib import Path


#: So many heartbeats of a batch are measured.
MOST_HEARTBEATS: Final = 32


@dataclass
class Parked:
    """A message the target cannot take, and why."""

    sequence: int
    stored_ns: int
    subject: str
    payload_bytes: int
    reason: str


@dataclass
class Receipt:
    """The work of one batch's writers, added up; a commit uses nothing else.

    `last_sequence` is the last source message that was read, stored at `last_stored_ns` (unix ns). `target_sequence` is the
    highest sequence in the target that was acknowledged or found, `target_holds` the source sequence of the copy there,
    `disordered` how many copies come right after one of a later source sequence. `copied_ranges` are runs of copies:
    (target sequence, source sequence, how many are consecutive in both). `missing` are ranges that the source does not hold
    (any more); `found` counts the copies that an earlier attempt left in the target; `failure` is one line when the target
    refuses: then the intent stays open. `heartbeats` are the target sequences of the last heartbeats among the copies.
    """

    copied: int = 0
    copied_bytes: int = 0
    found: int = 0
    too_old: int = 0
    too_old_bytes: int = 0
    last_sequence: int = 0
    last_stored_ns: int | None = None
    target_sequence: int = 0
    target_holds: int = 0
    disordered: int = 0
    copied_ranges: list[tuple[int, int, int]] = field(default_factory=list)
    parked: list[Parked] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    failure: str | None = None
    heartbeats: list[int] = field(default_factory=list)

    def count(self, payload_bytes: int) -> None:
        """Count one copied message."""
        self.copied += 1
        self.copied_bytes += payload_bytes

    def locate(self, target_sequence: int, sequence: int) -> None:
        """Record the target sequence of a source sequence's copy."""
        at, first, length = self.copied_ranges[-1] if self.copied_ranges else (0, 0, 0)
        if target_sequence == at + length and sequence == first + length:
            self.copied_ranges[-1] = (at, first, length + 1)
        else:
            self.copied_ranges.append((target_sequence, sequence, 1))
        if target_sequence > self.target_sequence:
            self.disordered += sequence < self.target_holds
            self.target_sequence, self.target_holds = target_sequence, sequence

    def add(self, other: Receipt) -> None:
        """Add another writer's receipt."""
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.found += other.found
        self.too_old += other.too_old
        self.too_old_bytes += other.too_old_bytes
        if other.last_sequence > self.last_sequence:
            self.last_sequence, self.last_stored_ns = other.last_sequence, other.last_stored_ns
        if other.target_sequence > self.target_sequence:
            self.target_sequence, self.target_holds = other.target_sequence, other.target_holds
        self.disordered += other.disordered
        self.copied_ranges += other.copied_ranges
        self.parked += other.parked
        self.missing += other.missing
        self.failure = self.failure or other.failure
        self.heartbeats = (self.heartbeats + other.heartbeats)[-MOST_HEARTBEATS:]

    def write(self, file: Path) -> None:
        """Write the receipt to a file, atomically."""
        draft = file.with_name(f".{file.name}")
        draft.write_text(self.encode())
        draft.replace(file)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file made by `write`."""
        return cls.decode(file.read_text())

    def encode(self) -> str:
        """Return the receipt as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Read what `encode` has made."""
        raw = json.loads(text)
        parked = [Parked(**fields) for fields in raw["parked"]]
        runs = {key: [tuple(numbers) for numbers in raw[key]] for key in ("copied_ranges", "missing")}
        return cls(**{**raw, **runs, "parked": parked})
