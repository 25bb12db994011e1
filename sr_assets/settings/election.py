"""Leader election: the name of this member, and the blocks `leader_election` and `checkpoint`."""

import re
from typing import Annotated, Final, Literal

from pydantic import InstanceOf

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.settings.cluster_urls import parse_cluster
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import Span, Value, read_secret, read_text, shown

_LONGEST_NAME_BYTES: Final = 200
_SHORTEST_KEY: Final = 16


def _member(value: object) -> str:
    """Read a member's name; `false` and empty blocks disable the election."""
    if value in ({}, [], False):
        return ""
    name = read_text(value)
    if name != name.strip() or len(name.encode()) > _LONGEST_NAME_BYTES:
        raise ValueError(
            f"{shown(name)} cannot be a member's name: no spaces around it, at most {_LONGEST_NAME_BYTES} bytes"
        )
    return name


def _bucket(value: object) -> str:
    name = read_text(value)
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", name):
        raise ValueError(
            f"{shown(name)} is not a bucket: use letters, digits, '_' and '-', at most 200 characters, such as"
            " CHORIA_LEADER_ELECTION"
        )
    return name


def _where(value: object) -> Literal["source", "target"] | ClusterSettings:
    match value.lower() if isinstance(value, str) else value:
        case "source":
            return "source"
        case "target":
            return "target"
    return parse_cluster(value)


def _signing_key(value: object) -> str:
    key = read_secret(value)
    if len(key) < _SHORTEST_KEY:
        raise ValueError(
            f"is shorter than {_SHORTEST_KEY} characters; use a random one, such as of openssl rand -hex 32"
        )
    return key


Member = Annotated[str, Value(_member, type="text")]
Bucket = Annotated[str, Value(_bucket, type="name")]
Where = Annotated[
    Literal["source", "target"] | InstanceOf[ClusterSettings], Value(_where, type="`source`, `target`, URL")
]


class ElectionSettings(Block):
    """`leader_election`: the location of the election's keys."""

    bucket: Bucket = file_key(
        "the key-value bucket, created with a TTL of 10 s if missing; its TTL must be 1 s to 1 h",
        "CHORIA_LEADER_ELECTION",
    )
    cluster: Where = file_key("the bucket's cluster: the entry's source or target, or a URL", "source")


class CheckpointSettings(Block):
    """`checkpoint`: the object store with the sites' states, for other hosts and lost disks."""

    interval_ns: Span = file_key("minimum time between two checkpoints of a site; `0`: none", "60s", name="interval")
    bucket: Bucket = file_key("the object store, created if missing", "SR_ASSETS_STATE")
    cluster: Where = file_key("the store's cluster: the first entry's source or target, or a URL", "source")
    key: Annotated[str, Value(_signing_key)] = file_key(
        "signs the checkpoints, the same one at every member, at least 16 characters; this member then refuses others",
        "",
        default_text="unsigned",
        secret=True,
    )
