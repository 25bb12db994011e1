"""The subjects of a stream's messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster

#: Of about 100 bytes each at most: a leaf node's link accepts messages of 1 MiB by default.
_LISTED: Final = 10_000


class TooManySubjectsError(RunError):
    """A list of a stream's subjects may be larger than the messages that a leaf node's link accepts."""


def held_subjects(cluster: Cluster, stream: str, subject: str = ">") -> Iterator[str]:
    """Yield the subjects of a stream's messages that match a pattern, from pages of 100,000.

    Raises TooManySubjectsError for a stream of another domain or account with more than 10,000 subjects: a leaf node closes
    its link on a response over `max_payload`.
    """
    if cluster.settings.api_owner:
        count = cluster.request_api(f"STREAM.INFO.{stream}")["state"].get("num_subjects", 0)
        if count > _LISTED:
            raise TooManySubjectsError(f"{stream} holds {count} subjects, too many to list through a leaf node")
    offset, total = 0, 1
    while offset < total:
        answer = cluster.request_api(f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset})
        page = answer["state"].get("subjects") or {}
        yield from page
        offset, total = offset + len(page), answer.get("total", 0) if page else 0
