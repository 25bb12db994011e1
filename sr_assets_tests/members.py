"""Members of an election: homes with the same site, a bucket, and keys of a Stream Replicator.

A TTL of a minute outlasts any stall of a busy machine. A test that needs the end of a lease says so: `end_lease`, `expire`.
"""

from __future__ import annotations

import io
import json
import tarfile
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from sr_assets.adapters import times
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.wire import Outgoing, Publisher
from sr_assets.adapters.wire.frames import encode_pub
from sr_assets.settings import Settings
from sr_assets_tests.rig import SITE, Rig, cluster, connection

TTL_SECONDS = 60.0
_SNAPSHOT_NAME = b"\xff\x06\x00\x00S2sTwO"
_PLAIN_CHUNK = b"\x01"


def make_bucket(rig: Rig, ttl_seconds: float = TTL_SECONDS) -> str:
    """Create a bucket as `nats kv add --ttl` did years ago; return its name.

    Members lead in it immediately: they wait until a bucket is older than its TTL.
    """
    config = bucket_config(rig.unique("ELECTION"), ttl_seconds)
    snapshot = io.BytesIO()
    with tarfile.open(fileobj=snapshot, mode="w") as archive:
        # The server reads the creation time and ignores the checksum.
        for name, text in (("meta.inf", json.dumps({**config, "created": "2020-01-01T00:00:00Z"})), ("meta.sum", "")):
            file = tarfile.TarInfo(name)
            file.size = len(text)
            archive.addfile(file, io.BytesIO(text.encode()))
    empty = dict.fromkeys(("messages", "bytes", "first_seq", "last_seq", "consumer_count"), 0)
    with connection(rig.source) as opened:
        answer = opened.request_api(f"STREAM.RESTORE.{config['name']}", {"config": config, "state": empty})
        for chunk in (_as_s2(snapshot.getvalue()), b""):
            inbox = opened.new_inbox()
            opened.send(encode_pub(answer["deliver_subject"], inbox, b"", chunk))
            (frame,) = opened.receive(opened.request_seconds)
    assert json.loads(frame.payload)["created"].startswith("2020"), frame
    return str(config["name"]).removeprefix("KV_")


def _as_s2(data: bytes) -> bytes:
    """Return a stream of S2, the compression of snapshots, with one chunk that is not compressed."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    chunk = masked.to_bytes(4, "little") + data
    return _SNAPSHOT_NAME + _PLAIN_CHUNK + len(chunk).to_bytes(3, "little") + chunk


def end_lease(home: Path, name: str = SITE) -> None:
    """Let the deadline of a home's lease, of a site or `SITE/locks`, pass; the process that renews it must be stopped."""
    folder = home / "sites" / name
    lease = Lease.read(folder)
    assert lease.holds, lease.line
    replace(lease, deadline=times.boot_seconds()).write(folder)


def expire(rig: Rig, bucket: str, pattern: str = ">") -> None:
    """Remove keys and records as the server does at `max_age`: it leaves no marker."""
    answer = rig.api(f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.{pattern}"})
    assert answer.get("success"), answer


def bucket_config(bucket: str, ttl_seconds: float = TTL_SECONDS) -> dict[str, Any]:
    """Return the configuration of a bucket's stream."""
    config: dict[str, Any] = {"max_msgs_per_subject": 1, "max_age": int(ttl_seconds * 1e9), "discard": "new"}
    config |= {"allow_rollup_hdrs": True, "deny_delete": True, "allow_direct": True, "duplicate_window": 10**8}
    config |= {"storage": "file", "retention": "limits", "num_replicas": 1}
    return {"name": f"KV_{bucket}", "subjects": [f"$KV.{bucket}.>"], **config}


def member(rig: Rig, folder: Path, name: str, bucket: str, **top: Any) -> Settings:
    """Return the configuration of a member with a home of its own and the rig's entries."""
    (folder / name).mkdir(exist_ok=True)
    other = copy(rig)
    other.home = folder / name
    return other.settings(**elected(name, bucket), **top)


def elected(name: str, bucket: str) -> dict[str, Any]:
    """Return the keys of a member's election, with a store of checkpoints of its own."""
    return {
        "leader_election_name": name,
        "leader_election": {"bucket": bucket},
        "checkpoint": {"bucket": f"{bucket}_STATE", "interval": "1s"},
    }


def key_of(stream: str) -> str:
    """Return the key of a stream of the rig's site."""
    return f"SR_{SITE}_{stream}"


def write_key(rig: Rig, bucket: str, key: str, value: str, revision: int | None = 0, **headers: str) -> int | None:
    """Write a key as the Stream Replicator does; return its revision, or None if the server refuses."""
    if revision is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
    lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    item = Outgoing(1, f"$KV.{bucket}.{key}", f"NATS/1.0\r\n{lines}\r\n".encode(), value.encode())
    with connection(rig.source) as opened:
        (ack,) = Publisher(opened).publish_all([item])
    return ack.target_sequence


def read_key(rig: Rig, bucket: str, key: str) -> bytes | None:
    """Return a key's value, or None if it is missing or deleted."""
    with cluster(rig.source) as opened:
        message = opened.last_message(f"KV_{bucket}", f"$KV.{bucket}.{key}")
    return None if message is None or b"KV-Operation" in message.headers else message.payload
