"""`data`: named sources of values, and the references that stand in place of a value."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import did_you_mean
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.cluster_urls import ChoriaBlock, FilePath, TlsBlock, parse_cluster, with_api, with_security
from sr_assets.settings.election import Bucket
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import Domain
from sr_assets.settings.values import (
    Flag,
    Secret,
    Text,
    Value,
    as_list,
    choice,
    read_duration,
    read_flag,
    read_secret,
    shown,
)

SourceType = Literal["kv", "file", "environment", "memory", "consul"]
#: Instead of the default of a reference without one, and of the value of a missing key.
MISSING: Final = object()
#: The required and the other keys of each type.
_KEYS: Final[dict[str, tuple[set[str], set[str]]]] = {
    "kv": ({"url", "bucket"}, {"tls", "choria", "domain", "trusted"}),
    "file": ({"path"}, set()),
    "environment": (set(), {"prefix"}),
    "memory": (set(), {"values"}),
    "consul": ({"url"}, {"prefix", "token", "tls", "trusted"}),
}
_FORM: Final = re.compile(r"([A-Za-z0-9_-]+)/([!-.0-~][!-~]*)")
_REFERENCE_KEYS: Final = {"data", "default", "dynamic"}
_ALLOWED: Final = (
    r"sensor(\.(interval|lag_messages|lag_seconds))?|run_budget|linger|concurrency|catch_up_messages|maintenance(\..*)?"
    r"|notify(\..*)?|(streams|feeds)\.(batch_messages|batch_bytes|catch_up_messages|paused|maintenance(\..*)?)"
)


def _values(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of keys to values")
    return value


class SourceSettings(Block):
    """One of `data`: a source with its own connection and login."""

    type: Annotated[SourceType, choice(SourceType)] = file_key("where the values are")
    url: Annotated[str, Value(read_secret, type="URL")] | None = file_key(
        "of `kv`: the cluster, see [URLs and TLS](#urls-and-tls); of `consul`: `http://host:8500`", None, secret=True
    )
    bucket: Bucket | None = file_key("of `kv`: the key-value bucket", None)
    path: FilePath | None = file_key(
        "of `file`: a YAML or JSON file; the key `a.b` is the key `b` in the mapping `a`", None
    )
    prefix: Text = file_key("of `environment` and `consul`: prepended to each key", "")
    values: Annotated[dict[str, Any], Value(_values, type="mapping")] = file_key(
        "of `memory`: the values by key", {}, default_text="none", secret=True
    )
    token: Secret | None = file_key("of `consul`: its ACL token", None, secret=True)
    tls: TlsBlock | None = file_key("of `kv` and `consul`; see [URLs and TLS](#urls-and-tls)", None)
    choria: ChoriaBlock | None = file_key("of `kv`; see [Choria](#choria)", None)
    domain: Domain | None = file_key(
        "of `kv`: the JetStream domain of the bucket", None, default_text="the server's own"
    )

    trusted: Flag = file_key(
        "of `kv` and `consul`: its values may fill keys that execute or locate something, such as commands, paths, URLs and"
        " logins; a writer then has the rights of this service",
        False,
    )

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        required, others = _KEYS[self.type]
        missing = sorted(required - self.model_fields_set)
        if missing:
            raise ValueError(f"type {self.type} needs {' and '.join(missing)}")
        unused = sorted(self.model_fields_set - required - others - {"type"})
        if unused:
            raise ValueError(f"{unused[0]}: is not a key of type {self.type}; remove it")
        if self.type == "kv":
            _ = self.cluster
        if self.type == "consul":
            _consul_url(self.url or "")
        return self

    @cached_property
    def cluster(self) -> ClusterSettings:
        """The cluster of a `kv` source; raises ValueError if keys about it contradict each other."""
        return with_security(with_api(parse_cluster(self.url), self.domain, None), [self.tls], [self.choria])

    @property
    def is_remote(self) -> bool:
        """Whether others may write the values, which are then data: no reference in them is resolved."""
        return self.type in ("kv", "consul")

    @property
    def label(self) -> str:
        """The source without its login, for messages."""
        match self.type:
            case "kv":
                return f"bucket {self.bucket} on {self.cluster.label}"
            case "file":
                return str(self.path)
            case "environment":
                return f"environment {self.prefix}*"
            case "consul":
                return f"consul {_consul_url(self.url or '')}/v1/kv/{self.prefix}"
        return "memory"


def _consul_url(url: str) -> str:
    """Return the URL of Consul without a final slash; errors show no part of the URL."""
    try:
        parts, _ = urlsplit(url), urlsplit(url).port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ValueError("url: is not a Consul URL; use http://host:8500 or https://host:8501, and token for a login")
    return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference in place of a value: its source and key, its default or MISSING, and whether it is dynamic."""

    source: str
    key: str
    default: Any = MISSING
    dynamic: bool = False

    @property
    def label(self) -> str:
        """`source/key`."""
        return f"{self.source}/{self.key}"


def is_reference(value: object) -> bool:
    """Return whether a value of the file is a reference instead."""
    if not isinstance(value, dict):
        return False
    keys = {str(key).lower() for key in value}
    return "data" in keys and all(did_you_mean(key, _REFERENCE_KEYS) for key in keys)


def parse_reference(value: dict[Any, Any]) -> Reference:
    """Return the reference in a mapping; raises ValueError if it is malformed."""
    parts = {str(key).lower(): item for key, item in value.items()}
    source, key = split_label(parts["data"])
    for unknown in parts.keys() - _REFERENCE_KEYS:
        raise ValueError(
            f"data {source}/{key}: {shown(unknown)} is not a key of a reference; {did_you_mean(unknown, _REFERENCE_KEYS)}"
            "use default and dynamic"
        )
    try:
        dynamic = read_flag(parts.get("dynamic", False))
    except ValueError as error:
        raise ValueError(f"data {source}/{key}: dynamic: {error}") from None
    return Reference(source, key, parts.get("default", MISSING), dynamic)


def split_label(value: object) -> tuple[str, str]:
    """Return the source and the key of `SOURCE/KEY`; raises ValueError for anything else."""
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"data {shown(value)}: is not a reference; use SOURCE/KEY such as ops/cadence")
    return match[1], match[2]


def refuse_dynamic(key: str, label: str) -> None:
    """Raise ValueError unless a key may have the dynamic value `source/key`; `key` is its path without indexes."""
    if not re.fullmatch(_ALLOWED, key):
        raise ValueError(
            f"data {label}: dynamic: cannot be used here: a replay must decide with the same value; remove dynamic, or use it"
            " for sensor, run_budget, linger, concurrency, batch_messages, batch_bytes, catch_up_messages, paused, maintenance,"
            " notify"
        )


def read_lock(value: object) -> str:
    """Read a lock's `SOURCE/NAME`; the name is a key of the source's bucket."""
    source, name = split_label(value)
    if not re.fullmatch(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*", name):
        raise ValueError(f"{shown(value)}: is not a lock; use SOURCE/NAME with letters, digits, '_', '-', '/' and '.'")
    return f"{source}/{name}"


def _lock_ttl(value: object) -> int:
    ttl_ns = read_duration(value)
    if not SECOND_NS <= ttl_ns <= 3600 * SECOND_NS:
        raise ValueError(f"{shown(value)} is out of range; use 1s to 1h")
    return ttl_ns


def refuse_unusable_locks(sources: Mapping[str, SourceSettings], locks: Iterable[tuple[str, ...]]) -> None:
    """Refuse a lock in a source that is not configured or not a bucket."""
    for lock in (each for some in locks for each in some):
        name = split_label(lock)[0]
        if name not in sources:
            raise ValueError(
                f"locks: {lock}: source {name!r} is not configured; {did_you_mean(name, sources)}add it to data"
            )
        if sources[name].type != "kv":
            raise ValueError(f"locks: {lock}: source {name!r} is of type {sources[name].type}; use a source of type kv")


Locks = Annotated[tuple[Annotated[str, Value(read_lock)], ...], Value(as_list, type="list of SOURCE/NAME")]
LockTtl = Annotated[int, Value(_lock_ttl, type="duration, 1s to 1h")]
