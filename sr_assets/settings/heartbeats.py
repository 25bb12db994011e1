"""The block `heartbeats`, in the Stream Replicator's format."""

import re
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field, model_validator

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.hops import ORIGINATOR_HEADER, SUBJECT_HEADER
from sr_assets.settings.cluster_urls import ChoriaBlock, TlsBlock, Url, with_security
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import Subject
from sr_assets.settings.values import Duration, Flag, Value, read_secret, shown

#: Headers of every heartbeat.
ORIGINATOR = ORIGINATOR_HEADER.decode()
SUBJECT = SUBJECT_HEADER.decode()


def _headers(value: object) -> tuple[tuple[str, str], ...]:
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


Headers = Annotated[tuple[tuple[str, str], ...], Value(_headers, type="mapping")]


class HeartbeatSubject(Block):
    """One of `subjects`: a subject for heartbeats, with the common interval and headers filled in."""

    subject: Subject = file_key("the subject")
    interval_ns: Duration = file_key("time between heartbeats", "10s", name="interval", default_text="the common one")
    headers: Headers = file_key("its headers, in addition to the common ones", {}, default_text="none")


class HeartbeatSettings(Block):
    """`heartbeats`: the heartbeats that this host publishes; its `tls` and `choria` are not inherited."""

    url: Url = file_key("the cluster")
    interval_ns: Duration = file_key("time between the heartbeats of a subject", "10s", name="interval")
    headers: Headers = file_key("headers of every heartbeat", {}, default_text="none")
    subjects: Annotated[tuple[HeartbeatSubject, ...], Field(min_length=1)] = file_key("the [subjects](#a-heartbeat)")
    leader_election: Flag = file_key("of all hosts with this key and the same `name`, only the leader publishes", False)
    tls: TlsBlock | None = file_key("see [URLs and TLS](#urls-and-tls)", None)
    choria: ChoriaBlock | None = file_key("see [Choria](#choria)", None)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _ = self.cluster
        subjects = tuple(
            subject.changed(
                interval_ns=subject.interval_ns if "interval_ns" in subject.model_fields_set else self.interval_ns,
                headers=tuple((dict(self.headers) | dict(subject.headers)).items()),
            )
            for subject in self.subjects
        )
        return self.changed(subjects=subjects)

    @cached_property
    def cluster(self) -> ClusterSettings:
        """The cluster that receives the heartbeats; raises ValueError if keys about it contradict each other."""
        return with_security(self.url, [self.tls], [self.choria])
