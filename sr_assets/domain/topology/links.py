"""A link from an origin to the stream that copies it: its state, its limits, and the identification of its copies."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, NamedTuple

from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.topology.found import FoundLink

LinkKind = Literal["mirror", "source", "replica", "feed"]

#: The header of a message that a source copied.
NATIVE_SOURCE_HEADER: Final = b"Nats-Stream-Source"
#: Servers send heartbeats every second, and reconnect after ten seconds without one.
_SILENT_SECONDS: Final = 10.0
_GO_UNITS: Final = {
    "h": 3600 * SECOND_NS,
    "m": 60 * SECOND_NS,
    "s": SECOND_NS,
    "ms": 10**6,
    "us": 10**3,
    "µs": 10**3,
    "ns": 1,
}
_GO_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ms|us|µs|ns|[hms])")
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Limits(NamedTuple):
    """Limits of a link: silence that makes it dead, and lag that makes it late.

    With `lag_messages` None it is late if its oldest uncopied message waits for more than `silent_seconds`.
    """

    silent_seconds: float = _SILENT_SECONDS
    lag_messages: int | None = None


_USUAL: Final = Limits()


@dataclass(frozen=True, slots=True)
class Link:
    """A reported link: `stream` on `cluster` has copies of `origin_stream`.

    `active_seconds` None means never. An unknown lag is None, never 0. `origin_cluster` is None if the origin belongs
    to no configured cluster; `origin_domain` may be known nevertheless.
    """

    cluster: str
    stream: str
    kind: LinkKind
    origin_stream: str
    domain: str | None = None
    origin_cluster: str | None = None
    origin_domain: str | None = None
    filter: str | None = None
    transforms: str | None = None
    sampling: str | None = None
    api_prefix: str | None = None
    active_seconds: float | None = None
    lag_messages: int | None = None
    lag_seconds: float | None = None
    error: str | None = None
    as_of_ns: int | None = None
    limits: Limits = _USUAL

    @property
    def native(self) -> bool:
        """Whether servers copy it, through a mirror or a source."""
        return self.kind in ("mirror", "source")

    @property
    def dead(self) -> bool:
        """Whether a native link was never active, or not recently; other links are dead while they have an error."""
        if not self.native:
            return self.error is not None
        return self.active_seconds is None or self.active_seconds > self.limits.silent_seconds

    @property
    def behind(self) -> bool:
        """Whether the lag exceeds its limit; an unknown lag does not."""
        if self.limits.lag_messages is not None:
            return (self.lag_messages or 0) >= self.limits.lag_messages
        return (self.lag_messages or 0) > 0 and (self.lag_seconds or 0.0) > self.limits.silent_seconds

    @property
    def copies(self) -> str | None:
        """Its filter and transforms as text, or None for an unchanged copy."""
        return "; ".join(filter(None, [self.filter, self.transforms])) or None


def limits(metadata: Mapping[str, str]) -> Limits:
    """Return the limits in a stream's metadata, with natscli's keys; invalid limits are ignored."""
    seen, lag = metadata.get("io.nats.monitor.seen-critical", ""), metadata.get("io.nats.monitor.lag-critical", "")
    parts = _GO_PART.findall(seen)
    seconds = float(sum(Fraction(number.rstrip(".")) * _GO_UNITS[unit] for number, unit in parts) / SECOND_NS)
    whole = "".join(number + unit for number, unit in parts) == seen
    return Limits(
        seconds if whole and seconds > 0 else _SILENT_SECONDS,
        int(lag) if re.fullmatch("[1-9][0-9]{0,18}", lag) else None,
    )


class Mark(NamedTuple):
    """The origin of a copied message; `hash` identifies the API prefix, empty for the same JetStream."""

    stream: str
    hash: str
    sequence: int
    filters: str


def read_mark(value: str) -> Mark | None:
    """Parse a `Nats-Stream-Source` header of any server since 2.10; None if it is invalid."""
    parts = value.split(" ")
    if len(parts) < 3 or not re.fullmatch("[0-9]{1,20}", parts[1]):
        return None
    # Servers since 2.14 may add the hash of a consumer.
    stream, _, rest = parts[0].partition(":")
    own = "" if rest.startswith("C=") else rest.partition(":")[0]
    return Mark(stream, own, int(parts[1]), parts[2])


def brought_by(mark: Mark, link: FoundLink, links: Sequence[FoundLink]) -> bool:
    """Return whether a source of a stream copied a message; `links` are all sources of that stream."""
    if mark.stream != link.stream:
        return False
    if mark.hash != (api_hash(link.api) if link.api else ""):
        return False
    alike = [other for other in links if (other.stream, other.api) == (link.stream, link.api)]
    return len(alike) == 1 or mark.filters == (
        "\f".join(transform.src for transform in link.transforms) or link.filter_subject or ">"
    )


def api_hash(api: str) -> str:
    """Return the server's hash for the messages of an origin behind an API prefix."""
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in hashlib.sha256(api.encode()).digest()[:8])
