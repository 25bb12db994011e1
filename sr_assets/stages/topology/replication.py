"""The replication of each stream as text: its origins, and our entries that copy it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sr_assets.domain.topology.links import Link
from sr_assets.settings import FeedSettings, Settings

if TYPE_CHECKING:
    from sr_assets.stages.topology.survey import Survey

#: Number of streams or entries that a text names of each kind.
_MOST_NAMED: Final = 3


def replication_texts(settings: Settings, survey: Survey, links: Sequence[Link]) -> dict[tuple[str, str], str]:
    """Return, by cluster and stream, which streams it mirrors, sources or copies, and which entries copy or read it."""
    relations_of: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for link in filter(lambda link: link.native, links):
        origin = _seen_from(link.cluster, link.origin_cluster, link.origin_stream)
        relations_of[link.cluster, link.stream]["mirror of" if link.kind == "mirror" else "sources"].append(origin)
    for entry in settings.entries:
        there = survey.name_of(entry.source)
        if isinstance(entry, FeedSettings):
            relations_of[there, entry.stream]["read by feed"].append(entry.name)
            continue
        here = survey.name_of(entry.target)
        copied = f"{_seen_from(here, there, entry.stream)} by {entry.name}"
        relations_of[here, entry.target_stream]["copy of"].append(copied)
        relations_of[there, entry.stream]["copied by"].append(entry.name)
    return {
        stream: "; ".join(f"{relation} {_listed(others)}" for relation, others in relations.items())
        for stream, relations in relations_of.items()
    }


def _seen_from(cluster: str, origin_cluster: str | None, stream: str) -> str:
    return stream if origin_cluster in (None, cluster) else f"{origin_cluster}/{stream}"


def _listed(names: Sequence[str]) -> str:
    distinct = sorted(set(names))
    more = len(distinct) - _MOST_NAMED
    return ", ".join(distinct[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
