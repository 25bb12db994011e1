"""The block `heartbeats`, in the Stream Replicator's format."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, InstanceOf

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.heartbeats import ORIGINATOR_HEADER, SUBJECT_HEADER
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.clusters import parse_cluster
from sr_assets.settings.links import RawChoria, RawTls, with_security
from sr_assets.settings.mapping import Raw
from sr_assets.settings.names import read_plain_subject
from sr_assets.settings.values import read_duration, read_flag, read_secret, shown

#: Headers of every heartbeat.
ORIGINATOR = ORIGINATOR_HEADER.decode()
SUBJECT = SUBJECT_HEADER.decode()

Url = Annotated[InstanceOf[ClusterSettings], BeforeValidator(parse_cluster)]
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HeartbeatSubject:
    """A subject for heartbeats, its interval, and its headers including the common ones."""

    subject: str
    interval_ns: int
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """The heartbeats that this host publishes. `Settings.digest` includes them without secrets."""

    cluster: ClusterSettings
    subjects: tuple[HeartbeatSubject, ...] = field(default=())


def read_headers(value: object) -> Headers:
    """Read a mapping of header names to text."""
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of header names to text")  # noqa: TRY004  pydantic requires ValueError
    for name, text in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[!-9;-~]+", name):
            raise ValueError(f"{shown(name)} is not a header name; use printable ASCII without spaces and colons")
        if name.lower() in (ORIGINATOR.lower(), SUBJECT.lower()):
            raise ValueError(f"{name}: every heartbeat has this header; remove it")
        try:
            read_secret(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple((name, text.strip()) for name, text in value.items())


class RawHeartbeatSubject(Raw):
    """One of `subjects`."""

    subject: Annotated[str, BeforeValidator(read_plain_subject)]
    interval: Annotated[int, BeforeValidator(read_duration)] | None = None
    headers: Annotated[Any, BeforeValidator(read_headers)] = ()


class RawHeartbeats(Raw):
    """`heartbeats` of the file; its `tls` and `choria` are not inherited."""

    url: Url
    interval: Annotated[int, BeforeValidator(read_duration)] = 10 * SECOND_NS
    headers: Annotated[Any, BeforeValidator(read_headers)] = ()
    subjects: list[RawHeartbeatSubject] = Field(min_length=1)
    leader_election: Annotated[bool, BeforeValidator(read_flag)] = False
    tls: RawTls | None = None
    choria: RawChoria | None = None

    @property
    def settings(self) -> HeartbeatSettings:
        """The settings of the block; raises ValueError for contradictory parts."""
        common = dict(self.headers)
        subjects = [
            HeartbeatSubject(
                heartbeat.subject,
                heartbeat.interval or self.interval,
                tuple((common | dict(heartbeat.headers)).items()),
            )
            for heartbeat in self.subjects
        ]
        return HeartbeatSettings(with_security(self.url, [self.tls], [self.choria]), tuple(subjects))
