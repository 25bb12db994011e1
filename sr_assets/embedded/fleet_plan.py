"""The plan of an emulated fleet: nodes appear, fall silent, come back and retire; and the realistic message of a node.

The same plan always yields the same publications. Compression dominates the cost of a message, so nodes share the compressed
bulk of an inventory; the node's own part precedes it as a stored deflate block. The result is one ordinary gzip member, made in
about 20 µs.
"""

import base64
import hashlib
import json
import math
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count, islice

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.registration import INVENTORY_PROTOCOL

_ADAPTER_PROTOCOL = "choria:adapters:choria_streams:output:1"

# Sizes relative to the typical one, with their frequency in percent: typical 7 KB means 2 to 25 KB.
_SIZES = {0.35: 5, 0.6: 12, 0.85: 20, 1.0: 25, 1.15: 18, 1.5: 12, 2.2: 6, 3.5: 2}
_VARIANTS = 4
_ENVELOPE_BYTES = 1200  # the message around the shared bulk
_FACT_BYTES = 200  # more than a compressed fact takes
_END = b'"virtual":"kvm"}}'

_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_PACKAGE_NAMES = [
    f'"lib{stem}{number}"' for number in range(1, 101) for stem in ("acl", "curl", "elf", "ssl", "xml", "zstd")
]
_ROLES = ("web", "app", "sql", "mem", "log")
_PACKAGES = 20  # of a node that does not grow
_GROWTH_PACKAGES = 15  # added to a growing node's list each round, about 200 bytes …
_GROWTH_ROUNDS = 25  # … until it is reset after this number of rounds


@dataclass(frozen=True, slots=True)
class Bulk:
    """The shared end of an inventory: its JSON text and the same as a finished raw deflate stream."""

    text: bytes
    deflated: bytes


def bulks(typical_bytes: int, seed: int) -> tuple[list[Bulk], list[int]]:
    """Return the shared parts for messages of about `typical_bytes`, and the weights with which a fleet uses them."""
    generator = random.Random(f"{seed} bulks")
    shared = [_bulk(generator, typical_bytes * size) for size in _SIZES for _ in range(_VARIANTS)]
    return shared, [weight for weight in _SIZES.values() for _ in range(_VARIANTS)]


def _bulk(generator: random.Random, message_bytes: float) -> Bulk:
    """Collect facts until the compressed text fills its share of a message (base64 needs 4 bytes for 3)."""
    wanted_bytes = (message_bytes - _ENVELOPE_BYTES) * 3 / 4
    facts, text, deflated = _facts(generator), b"", b""
    while not text or len(deflated) < wanted_bytes:
        # Compress in one piece, as nodes do: with a flush after each fact, unpacking would take three times as long.
        text += b"".join(islice(facts, max(1, int(wanted_bytes - len(deflated)) // _FACT_BYTES)))
        compressor = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        deflated = compressor.compress(text + _END) + compressor.flush()
    return Bulk(text + _END, deflated)


def _facts(generator: random.Random) -> Iterator[bytes]:
    """Yield facts endlessly: disks, interfaces and keys, about 300 bytes of JSON each, with a comma after each."""
    number = 0
    while True:
        facts = {
            f"disk_{number}": {"serial": f"{generator.getrandbits(64):016X}", "bytes": generator.getrandbits(43)},
            f"eth{number}": {
                "mac": generator.randbytes(6).hex(":"),
                "ip6": f"fd00::{generator.getrandbits(16):x}",
                "mtu": 1500,
            },
            f"ssh_{number}": {"type": "ed25519", "sha256": generator.randbytes(32).hex()},
        }
        yield json.dumps(facts, separators=(",", ":"))[1:-1].encode() + b","
        number += 1


def registration_message(sender: str, bulk: Bulk, packages: int, epoch_seconds: int, seed: int) -> bytes:
    """Return the adapter's JSON as stored in the stream; deterministic.

    `packages` is the number of packages in the inventory (about 13 bytes of message each), `epoch_seconds` the stated
    time of sending. A `sender` is a host name, which needs no escapes in JSON.
    """
    head = (
        f'{{"agents":[{{"name":"rpcutil","version":"0.30.2","license":"Apache-2.0","timeout":2,"url":"https://choria.io/"}}],'
        f'"classes":["roles::{sender[:3]}"],"collectives":["mcollective"],"build_info":{{"version":"0.30.2"}},'
        f'"machines":[{{"name":"facts_gatherer","version":"1.0.0","state":"WAIT"}}],'
        f'"status":{{"identity":"{sender}","uptime":{epoch_seconds % 10_000_000},"last_message":{epoch_seconds},'
        f'"provisioning_mode":false}},"facts":{{"fqdn":"{sender}","packages":[{",".join(_PACKAGE_NAMES[:packages])}],'
    ).encode()
    length = len(head)
    checksum = zlib.crc32(bulk.text, zlib.crc32(head))
    compressed = b"".join((
        _GZIP_HEADER,
        b"\x00" + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little") + head,
        bulk.deflated,
        checksum.to_bytes(4, "little") + (length + len(bulk.text)).to_bytes(4, "little"),
    ))  # fmt: skip
    request = hashlib.blake2b(f"{seed} {sender} {epoch_seconds}".encode(), digest_size=16).hexdigest()
    sent = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_seconds))
    return (
        f'{{"protocol":"{_ADAPTER_PROTOCOL}",'
        f'"data":"{{\\"protocol\\":\\"{INVENTORY_PROTOCOL}\\",\\"zcontent\\":\\"{base64.b64encode(compressed).decode()}\\"}}",'
        f'"sender":"{sender}","time":"{sent}","requestid":"{request}"}}'
    ).encode()


@dataclass(frozen=True, slots=True)
class Churn:
    """The share of nodes that come and go, and their time of silence between two messages.

    The short silence should be between the tracker's warning and its interval (timeout, recover), the long one above
    the interval (timeout, expire, then new again). Both are rounded up to whole rounds of the fleet, at least two.
    """

    share: float
    short_seconds: float
    long_seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which the nodes of a glob pattern, or a share of them, publish nothing; `cut`: their connections are closed."""

    from_seconds: float
    until_seconds: float
    match: str = "*"
    share: float = 1.0
    cut: bool = False

    def concerns(self, sender: str) -> bool:
        """Return whether a node takes part; the same nodes do in every run."""
        if not fnmatchcase(sender, self.match):
            return False
        seed = f"{self.match} {self.from_seconds} {sender}".encode()
        return int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest()) < self.share * (1 << 64)


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One node's message, published `at_seconds` after the fleet's start."""

    at_seconds: float
    sender: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The rounds in which a node publishes: from `first`, alternately `on` rounds and `off` silent ones; 0 off: all."""

    first: int = 0
    on: int = 1
    off: int = 0

    def publishes(self, round_: int) -> bool:
        since = round_ - self.first
        return since >= 0 and (not self.off or since % (self.on + self.off) < self.on)


@dataclass(frozen=True, slots=True)
class _Node:
    sender: str
    phase_seconds: float
    schedule: _Schedule
    grows: bool
    bulk: Bulk
    windows: tuple[Window, ...] = ()

    def publishes(self, round_: int, at_seconds: float) -> bool:
        return self.schedule.publishes(round_) and not any(
            window.from_seconds <= at_seconds < window.until_seconds for window in self.windows
        )

    def packages(self, round_: int) -> int:
        return _PACKAGES + (_GROWTH_PACKAGES * (round_ % _GROWTH_ROUNDS) if self.grows else 0)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The publications of a fleet: each node publishes once per round of `interval_seconds`, at a fixed offset.

    A quarter each of the changing nodes appears late, has repeated short silences, has repeated long silences, and stops
    forever. One node in ten has a growing inventory. `payload_bytes` is the typical size; the smallest nodes send a
    third of it, the largest 3.5 times as much. Every name ends in `suffix`.
    """

    nodes: int
    interval_seconds: float
    seed: int = 0
    churn: Churn | None = None
    payload_bytes: int = 7000
    suffix: str = ".example.net"
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.interval_seconds <= 0:
            raise ConfigurationError(
                f"a fleet of {self.nodes} nodes every {self.interval_seconds} s: both must be more than 0"
            )
        if not 1_000 <= self.payload_bytes <= 250_000:
            raise ConfigurationError(
                f"messages of {self.payload_bytes} bytes: the typical size must be between 1000 and 250000, "
                "so that the largest pass a server's limit of 1 MiB"
            )

    def sender(self, number: int) -> str:
        """Return the host name of node `number`, from 0."""
        return f"{_ROLES[number % len(_ROLES)]}{number // len(_ROLES) + 1}{self.suffix}"

    def senders(self, part: int = 0, parts: int = 1) -> list[str]:
        """Return the nodes, or every `parts`-th of them from `part` on."""
        return [self.sender(number) for number in range(part, self.nodes, parts)]

    def events(self, epoch_seconds: float = 0.0, part: int = 0, parts: int = 1) -> Iterator[PlannedMessage]:
        """Yield the publications endlessly in order of time; the fleet starts at `epoch_seconds`.

        With `parts`, yield those of the same nodes as `senders`.
        """
        nodes = self._nodes_in_order(part, parts)
        for round_ in count():
            for node in nodes:
                at = round_ * self.interval_seconds + node.phase_seconds
                if node.publishes(round_, at):
                    yield PlannedMessage(
                        at,
                        node.sender,
                        registration_message(
                            node.sender, node.bulk, node.packages(round_), int(epoch_seconds + at), self.seed
                        ),
                    )

    def _nodes_in_order(self, part: int, parts: int) -> list[_Node]:
        """Return the nodes in the order in which they publish within a round."""
        generator = random.Random(f"{self.seed} fleet")
        shared, weights = bulks(self.payload_bytes, self.seed)
        schedules = self._schedules(generator)
        chosen = zip(schedules, generator.choices(shared, weights, k=self.nodes), strict=True)
        nodes = []
        for number, (schedule, bulk) in enumerate(chosen):
            phase_seconds = generator.random() * self.interval_seconds
            if number % parts == part:
                sender = self.sender(number)
                windows = tuple(window for window in self.windows if window.concerns(sender))
                nodes.append(_Node(sender, phase_seconds, schedule, number % 10 == 3, bulk, windows))
        return sorted(nodes, key=lambda node: node.phase_seconds)

    def _schedules(self, generator: random.Random) -> list[_Schedule]:
        """Return each node's schedule: every round, or one of four for randomly chosen nodes (at least one each)."""
        schedules = [_Schedule()] * self.nodes
        if not self.churn or self.churn.share <= 0:
            return schedules
        short, long = (
            max(1, math.ceil(seconds / self.interval_seconds) - 1)
            for seconds in (self.churn.short_seconds, self.churn.long_seconds)
        )
        changing = min(self.nodes, max(4, round(self.churn.share * self.nodes)))
        for index, number in enumerate(generator.sample(range(self.nodes), changing)):
            on = 2 + index // 4 % 3
            schedules[number] = (
                _Schedule(first=short + on),
                _Schedule(on=on, off=short),
                _Schedule(on=on, off=long),
                _Schedule(on=on, off=1 << 60),
            )[index % 4]
        return schedules
