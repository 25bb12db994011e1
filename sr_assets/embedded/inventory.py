"""The message of an emulated node: Choria's registration with an inventory of realistic shape and size.

Compression dominates the cost of such a message, so nodes share the compressed bulk of an inventory; the node's own part
precedes it as a stored deflate block. The result is one ordinary gzip member, made in about 20 µs.
"""

import base64
import hashlib
import json
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sr_assets.domain.registration import INVENTORY_PROTOCOL

_ADAPTER_PROTOCOL = "choria:adapters:choria_streams:output:1"

# Sizes relative to the typical one, with their frequency in percent: typical 7 KB means 2 to 25 KB.
_SIZES = {0.35: 5, 0.6: 12, 0.85: 20, 1.0: 25, 1.15: 18, 1.5: 12, 2.2: 6, 3.5: 2}
_VARIANTS = 4
_ENVELOPE_BYTES = 1200  # the message around the shared bulk
_FACT_BYTES = 200  # more than a compressed fact takes
_END = b'"virtual":"kvm"}}'

_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_PACKAGES = [
    f'"lib{stem}{number}"' for number in range(1, 101) for stem in ("acl", "curl", "elf", "ssl", "xml", "zstd")
]


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
        f'"provisioning_mode":false}},"facts":{{"fqdn":"{sender}","packages":[{",".join(_PACKAGES[:packages])}],'
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
