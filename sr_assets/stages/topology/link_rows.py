"""The rows of `report` and of the tables `topology_streams` and `topology_links`: every stream, every link and its true lag.

The server's own `lag` does not change while a link is dead, so it is not used. Unknown values are None, never 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters.nats.stream_info import parse_stream_info
from sr_assets.adapters.state.status_file import read_status
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message, header_values
from sr_assets.domain.topology.found import FoundLink, FoundStream
from sr_assets.domain.topology.links import NATIVE_SOURCE_HEADER, Limits, Link, LinkKind, brought_by, limits, read_mark
from sr_assets.domain.topology.wanted import Upstream, WantedStream
from sr_assets.settings import Entry, FeedSettings, Settings, StreamSettings
from sr_assets.stages.source.lag import compare_with_source

if TYPE_CHECKING:
    from sr_assets.adapters.nats.administration import Cluster
    from sr_assets.stages.topology.survey import ClusterSurvey, Survey

#: Number of messages at a stream's end that are searched for a source's last message.
_MOST_STEPS: Final = 200
#: Number of streams or entries that a text names of each kind.
_MOST_NAMED: Final = 3
_SECOND_NS: Final = 1_000_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LinkLag(NamedTuple):
    """Number of messages that are not copied yet, and the waiting time of the first one; None if unknown."""

    messages: int | None = None
    seconds: float | None = None


def measure_link(stream: FoundStream, link: FoundLink, at: Cluster, origin: FoundStream, origin_at: Cluster) -> LinkLag:
    """Return the lag of one link of a stream; `at` and `origin_at` are the clusters of copy and origin."""
    try:
        position = _position(stream, link, at, origin)
        if position is None:
            return LinkLag()
        if position >= origin.last_sequence:
            # A copy ahead of its origin means a recreated origin, unless the origin was queried earlier.
            ahead = position > origin.last_sequence and link.active_ns is None
            return LinkLag() if ahead else LinkLag(0, 0.0)
        messages = _count(link, position, origin, origin_at)
        return LinkLag(messages, _seconds(link, position, origin, origin_at) if messages else 0.0)
    except RunError:
        return LinkLag()


def _position(stream: FoundStream, link: FoundLink, at: Cluster, origin: FoundStream) -> int | None:
    """Return the last origin sequence that was copied or skipped, or None if unknown."""
    if link.kind == "mirror":
        copied: int | None = stream.last_sequence
    elif link.sequence is not None:
        copied = link.sequence
    else:
        copied = _last_brought(stream, link, at, origin)
    if copied:
        return copied
    if link.start_sequence:
        return link.start_sequence - 1
    # With a start time, the first sequence is unknown.
    return None if copied is None or (link.start_time and origin.last_sequence) else 0


def _last_brought(stream: FoundStream, link: FoundLink, at: Cluster, origin: FoundStream) -> int | None:
    """Return a source's last sequence according to the messages' headers, or 0 if none has one."""
    if not stream.last_sequence:
        return 0
    patterns = _outputs(link) or origin.config.get("subjects") or [">"]
    newest = [message for message in (at.last_message(stream.name, pattern) for pattern in patterns) if message]
    brought = [mark for message in newest if (mark := _brought(message, stream, link)) is not None]
    if brought:
        return max(brought)
    message = max(newest, default=None, key=lambda candidate: candidate.sequence)
    steps = 0
    while message is not None and message.sequence > 1 and steps < _MOST_STEPS:
        steps += 1
        sequence = message.sequence - 1
        message = at.message(stream.name, sequence)
        if message is None:
            break
        mark = _brought(message, stream, link)
        if mark is not None:
            return mark
    whole = int(stream.state.get("messages", 0)) == stream.last_sequence
    return 0 if whole and (message is None or message.sequence == 1) else None


def _brought(message: Message, stream: FoundStream, link: FoundLink) -> int | None:
    values = header_values(message.headers, NATIVE_SOURCE_HEADER)
    mark = read_mark(values[-1].decode(errors="replace")) if values else None
    return mark.sequence if mark and brought_by(mark, link, stream.links) else None


def _outputs(link: FoundLink) -> list[str]:
    """Return the subjects of its copies; empty if unknown."""
    if link.transforms:
        named = [transform.dest or transform.src for transform in link.transforms]
        return [] if any("{" in subject or "$" in subject for subject in named) else named
    return [link.filter_subject] if link.filter_subject else []


def _count(link: FoundLink, position: int, origin: FoundStream, origin_at: Cluster) -> int:
    """Return the number of origin messages to copy after a sequence."""
    if not link.filters:
        return origin.last_sequence - position
    return sum(origin_at.count_from(origin.name, position + 1, pattern) for pattern in link.filters)


def _seconds(link: FoundLink, position: int, origin: FoundStream, origin_at: Cluster) -> float | None:
    """Return the waiting time of the first uncopied message, by the origin's clock."""
    waiting = [origin_at.next_message(origin.name, position + 1, pattern) for pattern in link.filters or (">",)]
    stored = [message.stored_ns for message in waiting if message is not None]
    if not stored or origin.ts_ns is None:
        return None
    return max(0.0, round((origin.ts_ns - min(stored)) / 1e9, 3))


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


class StreamRow(NamedTuple):
    """A reported stream; in the row of an unreachable cluster, `stream` is None and `error` is set.

    `peers` are the servers that hold it: `*` marks the leader, `!` a server that is not current. `as_of_ns` is the
    server's time.
    """

    cluster: str
    domain: str | None = None
    stream: str | None = None
    storage: str | None = None
    replicas: int | None = None
    placement: str | None = None
    consumers: int | None = None
    messages: int | None = None
    bytes: int | None = None
    lost: int | None = None
    deleted: int | None = None
    leader: str | None = None
    as_of_ns: int | None = None
    peers: str | None = None
    api_level: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All streams and links of one survey, and the unreachable clusters with their reasons."""

    streams: list[StreamRow]
    links: list[Link]
    unreachable: dict[str, str]
    #: By cluster and stream: the streams that it mirrors, sources or copies, and the entries that copy it, as text.
    replication: dict[tuple[str, str], str]


def make_report(settings: Settings, survey: Survey) -> Report:
    """Return the rows of a survey."""
    streams = [row for surveyed in survey.of.values() for row in _stream_rows(surveyed)]
    native = [
        (surveyed, stream, link)
        for surveyed in survey.of.values()
        for stream in surveyed.streams.values()
        if surveyed.lists(stream.name)
        for link in stream.links
    ]
    links = survey.side_by_side(lambda link: _native(survey, *link), native)
    links += _missing(settings, survey)
    links += survey.side_by_side(lambda entry: _ours(settings, survey, entry), settings.entries)
    links.sort(key=lambda link: (link.cluster, link.stream, link.kind, link.origin_stream))
    unreachable = {surveyed.name: surveyed.error for surveyed in survey.of.values() if surveyed.error}
    return Report(streams, links, unreachable, replication_texts(settings, survey, links))


def _stream_rows(surveyed: ClusterSurvey) -> Iterator[StreamRow]:
    if surveyed.error:
        yield StreamRow(surveyed.name, surveyed.domain, error=surveyed.error)
    for stream in filter(lambda stream: surveyed.lists(stream.name), surveyed.streams.values()):
        state, lost = stream.state, stream.state.get("lost") or {}
        level = stream.metadata.get("_nats.req.level", "")
        yield StreamRow(
            surveyed.name,
            surveyed.domain,
            stream.name,
            stream.config.get("storage"),
            stream.config.get("num_replicas"),
            stream.placement,
            state.get("consumer_count"),
            state.get("messages"),
            state.get("bytes"),
            len(lost.get("msgs") or ()),
            state.get("num_deleted", 0),
            stream.leader,
            stream.ts_ns,
            ", ".join(peer.name + ("*" if peer.leads else "" if peer.current else "!") for peer in stream.peers)
            or None,
            int(level) if level.isdecimal() else None,
        )


def _native(survey: Survey, surveyed: ClusterSurvey, stream: FoundStream, link: FoundLink) -> Link:
    there, at = survey.origin(surveyed, link), survey.cluster(surveyed.name)
    lag = LinkLag()
    if there is None:
        origin = survey.through(surveyed, link)
        if origin is not None:
            lag = measure_link(stream, link, at, *origin)
    elif link.stream in there.streams:
        lag = measure_link(stream, link, at, there.streams[link.stream], survey.cluster(there.name))
    return Link(
        surveyed.name,
        stream.name,
        link.kind,
        link.stream,
        surveyed.domain,
        there.name if there else None,
        there.domain if there else link.domain,
        link.filter_subject,
        _transforms(link) or None,
        None,
        link.api,
        None if link.active_ns is None else round(link.active_ns / _SECOND_NS, 3),
        lag.messages,
        lag.seconds,
        link.error,
        stream.ts_ns,
        limits(stream.metadata),
    )


def _transforms(link: FoundLink | Upstream) -> str:
    return ", ".join(
        f"{transform.src} to {transform.dest}" if transform.dest else f"{transform.src} untransformed"
        for transform in link.transforms
    )


def _missing(settings: Settings, survey: Survey) -> list[Link]:
    """Return the links of configured streams that do not exist or whose cluster is unreachable."""
    rows = []
    for wanted in settings.topology.streams if settings.topology else ():
        surveyed = survey.of[wanted.cluster]
        if wanted.stream in surveyed.streams:
            continue
        error = f"stream {wanted.stream} {'does not answer' if wanted.stream in surveyed.silent else 'does not exist'}"
        if surveyed.error:
            error = f"cluster {surveyed.name} is unreachable"
        rows += [_wanted_link(survey, wanted, upstream, error) for upstream in wanted.upstreams]
    return rows


def _wanted_link(survey: Survey, wanted: WantedStream, upstream: Upstream, error: str) -> Link:
    return Link(
        wanted.cluster,
        wanted.stream,
        "mirror" if wanted.mirror else "source",
        upstream.stream,
        survey.of[wanted.cluster].domain,
        upstream.cluster,
        survey.of[upstream.cluster].domain,
        upstream.filter_subject,
        _transforms(upstream) or None,
        api_prefix=upstream.api,
        error=error,
    )


def _ours(settings: Settings, survey: Survey, entry: Entry) -> Link:
    """Return the link of an entry: a replica or a feed."""
    status = read_status(settings.home / "sites" / entry.name)
    own = status.of(entry.stream)
    there = survey.of[survey.name_of(entry.source)]
    copy = _view(survey, entry) if isinstance(entry, FeedSettings) else _replica(survey, entry)
    lag, error = LinkLag(), own.last_error
    if entry.stream in there.answers:
        info = parse_stream_info(there.answers[entry.stream], there.version)
        try:
            measured = compare_with_source(survey.cluster(there.name), entry, info, own)
            lag, error = LinkLag(measured.messages, measured.seconds), measured.problem or error
        except RunError:
            pass
    else:
        cause = "is unreachable" if there.error else f"has no stream {entry.stream}"
        error = error or f"cluster {there.name} {cause}"
    age = status.age_seconds if own.begun else None
    return Link(
        copy.cluster,
        copy.stream,
        copy.kind,
        entry.stream,
        survey.of[copy.cluster].domain,
        there.name,
        there.domain,
        entry.filter_subject,
        copy.rewriting,
        copy.sampling,
        None,
        None if age is None else round(age, 3),
        lag.messages,
        lag.seconds,
        error,
        there.streams[entry.stream].ts_ns if entry.stream in there.streams else None,
        Limits(),
    )


class _Copy(NamedTuple):
    """The result of an entry and its cluster; its subject rewriting and sampling as text."""

    cluster: str
    stream: str
    kind: LinkKind
    rewriting: str | None = None
    sampling: str | None = None


def _replica(survey: Survey, stream: StreamSettings) -> _Copy:
    parts = (stream.prefix and f"prefix {stream.prefix}", stream.remove and f"remove {stream.remove}")
    sampling = None
    if stream.policy is not None and stream.extractor is not None:
        sampling = f"by {stream.extractor.text} every {stream.policy.interval_ns / _SECOND_NS:g}s"
    rewriting = ", ".join(part for part in parts if part) or None
    return _Copy(survey.name_of(stream.target), stream.target_stream, "replica", rewriting, sampling)


def _view(survey: Survey, feed: FeedSettings) -> _Copy:
    """Return the global view of a feed, shown at the feed's cluster; it is not a stream."""
    return _Copy(survey.name_of(feed.source), f"{feed.label}/advisory_feed", "feed")


def stream_record(row: StreamRow) -> dict[str, Any]:
    """Return a stream's row by the column names of `topology_streams`."""
    record = row._asdict()
    record["as_of"] = _time(record.pop("as_of_ns"))
    return record


def link_record(link: Link) -> dict[str, Any]:
    """Return a link by the column names of `topology_links`."""
    return {
        "cluster": link.cluster,
        "stream": link.stream,
        "kind": link.kind,
        "origin_cluster": link.origin_cluster,
        "origin_stream": link.origin_stream,
        "filter": link.filter,
        "transforms": link.transforms,
        "active_seconds": link.active_seconds,
        "lag_messages": link.lag_messages,
        "lag_seconds": link.lag_seconds,
        "error": link.error,
        "as_of": _time(link.as_of_ns),
        "sampling": link.sampling,
        "api_prefix": link.api_prefix,
        "domain": link.domain,
        "origin_domain": link.origin_domain,
        "dead": link.dead,
    }


def _time(ns: int | None) -> datetime | None:
    return None if ns is None else _EPOCH + timedelta(microseconds=ns // 1000)


#: The columns of the tables `topology_streams` and `topology_links`, in order.
STREAM_COLUMNS: Final = tuple(stream_record(StreamRow("")))
LINK_COLUMNS: Final = tuple(link_record(Link("", "", "mirror", "")))
