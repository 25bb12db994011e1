"""The receipt of a batch: the result of one writer, or the sum of all its writers."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, Self

from sr_assets.domain.hops import Hop

#: At most this many heartbeats of a batch are measured.
MOST_HEARTBEATS: Final = 32
#: A writer reads at most so many other copies of a batch back, and about so many bytes, for their latency.
_MOST_MEASURED: Final = 24
_MEASURED_BYTES: Final = 1 << 20


@dataclass
class Parked:
    """A message that the target cannot store, and why."""

    sequence: int
    stored_ns: int
    subject: str
    payload_bytes: int
    reason: str


@dataclass
class Receipt:
    """The results of a batch's writers; a commit uses no other input.

    - `last_sequence`, `last_stored_ns`: the last source message that was read, and its stored time in unix ns
    - `target_sequence`: the highest target sequence that was acknowledged or found
    - `target_holds`: the source sequence of the copy at `target_sequence`
    - `disordered`: how many copies directly follow a copy of a later source sequence
    - `copied_ranges`: runs of copies that are consecutive on both sides: target sequence, source sequence, length
    - `missing`: ranges that the source does not hold
    - `held`: ranges that a lane's writer has read
    - `found`: how many copies an earlier attempt left in the target
    - `batched`: how many copies were published in fast-ingest batches
    - `in_spark`: whether Spark's tasks made the copies
    - `failure`: one line if the target refuses messages; then the intent stays open
    - `heartbeats`: the target sequences of the last copied heartbeats
    - `large`: the target sequences of copies that are not read back
    - `hops`: the hops of the measured copies
    - `impossible_hops`: how many further hops their headers name with impossible values
    - `forged`: how many messages of the target claimed to be copies, with another content than their original
    - `refused_metadata`: how many staged registrations have content that is unreadable or too large
    """

    copied: int = 0
    copied_bytes: int = 0
    found: int = 0
    batched: int = 0
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
    held: list[tuple[int, int]] = field(default_factory=list)
    in_spark: bool = False
    failure: str | None = None
    heartbeats: list[int] = field(default_factory=list)
    large: list[int] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    impossible_hops: int = 0
    refused_metadata: int = 0
    forged: int = 0

    def count(self, copies: int, payload_bytes: int) -> None:
        """Count copied messages."""
        self.copied += copies
        self.copied_bytes += payload_bytes

    @property
    def outcomes(self) -> int:
        """How many messages have an outcome: copied, too old, parked or missing."""
        missing = sum(after - first for first, after in self.missing)
        return self.copied + self.too_old + len(self.parked) + missing

    def measured(self) -> list[int]:
        """Return the target sequences of the copies to measure: the heartbeats and evenly spread others, ascending.

        Large copies are left out: a leaf node closes its link on such a response.
        """
        lengths = [length for _, _, length in self.copied_ranges]
        total, mean_bytes = sum(lengths), self.copied_bytes // max(self.copied, 1)
        count = min(total, max(1, min(_MOST_MEASURED, _MEASURED_BYTES // max(mean_bytes, 1))))
        ends = list(accumulate(lengths))
        chosen = set(self.heartbeats)
        for index in range(count):
            position = (2 * index + 1) * total // (2 * count)
            at = bisect_right(ends, position)
            chosen.add(self.copied_ranges[at][0] + position - (ends[at] - lengths[at]))
        return sorted(chosen.difference(self.large))

    def locate(self, target_sequence: int, sequence: int, copies: int = 1) -> None:
        """Record the target sequence of a source sequence's copy, and of the `copies` that are consecutive from it on."""
        at, first, length = self.copied_ranges[-1] if self.copied_ranges else (0, 0, 0)
        if target_sequence == at + length and sequence == first + length:
            self.copied_ranges[-1] = (at, first, length + copies)
        else:
            self.copied_ranges.append((target_sequence, sequence, copies))
        if target_sequence > self.target_sequence:
            self.disordered += sequence < self.target_holds
            self.target_sequence, self.target_holds = target_sequence + copies - 1, sequence + copies - 1

    def hold(self, sequences: list[int]) -> None:
        """Record ascending sequences that a lane's writer has read."""
        first = sequences[0]
        for before, after in pairwise(sequences):
            if after != before + 1:
                self.held.append((first, before + 1))
                first = after
        self.held.append((first, sequences[-1] + 1))

    def add(self, other: Receipt) -> None:
        """Add another writer's receipt."""
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.found += other.found
        self.batched += other.batched
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
        self.held += other.held
        self.failure = self.failure or other.failure
        self.heartbeats = (self.heartbeats + other.heartbeats)[-MOST_HEARTBEATS:]
        self.large += other.large
        self.hops += other.hops
        self.impossible_hops += other.impossible_hops
        self.refused_metadata += other.refused_metadata
        self.forged += other.forged

    def encode(self) -> str:
        # `asdict` would copy each of the runs, one per message if lanes alternate.
        return json.dumps({**vars(self), "parked": [vars(message) for message in self.parked]})

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Parse the output of `encode`."""
        raw = json.loads(text)
        parked = [Parked(**fields) for fields in raw["parked"]]
        runs = {key: [tuple(numbers) for numbers in raw[key]] for key in ("copied_ranges", "missing", "held")}
        return cls(**{**raw, **runs, "parked": parked, "hops": [Hop(*hop) for hop in raw["hops"]]})
