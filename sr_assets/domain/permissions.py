"""Permissions of a user at a NATS server, and the test whether a server grants them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.subjects import covers, overlaps

#: Any user may request its own permissions there, if it may publish the subject.
USER_INFO: Final = "$SYS.REQ.USER.INFO"


class Action(StrEnum):
    """The kind of a permission; an import belongs to the user's account."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    IMPORT = "import"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What the servers know about a stream: the subjects of its copies, the streams that store its advisories, and the
    streams of the same JetStream from which its source is copied. None: unknown.
    """

    copies: tuple[str, ...] | None = None
    keepers: tuple[str, ...] | None = None
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What the servers know: about streams, by label, and the JetStream domain of each connected server ("": none)."""

    streams: Mapping[str, StreamFacts] = field(default_factory=dict)
    domains: Mapping[ClusterSettings, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Granted:
    """A server's rules about one action: an empty `allow` permits every subject, `deny` takes precedence."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def includes(self, subject: str) -> bool:
        """Return whether every subject that matches a pattern is permitted."""
        if any(overlaps(denied, subject) for denied in self.deny):
            return False
        return not self.allow or _covered(subject, self.allow, max(pattern.count(".") for pattern in self.allow))


def _covered(subject: str, allow: Sequence[str], depth: int) -> bool:
    """Return whether patterns together cover a pattern; `depth` bounds the tokens for which a `>` is split."""
    if any(covers(pattern, subject) for pattern in allow):
        return True
    if not subject.endswith(">") or subject.count(".") > depth:
        return False
    # `a.>` means `a.*` and `a.*.>`.
    stem = subject[:-1]
    return _covered(f"{stem}*", allow, depth) and _covered(f"{stem}*.>", allow, depth)
