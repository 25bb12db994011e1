"""Contradictions between keys of `topology` that are valid alone: in one stream, and between streams.

They include settings that a server would refuse or ignore.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from sr_assets.domain import subjects
from sr_assets.domain.topology.wanted import Upstream, WantedStream
from sr_assets.settings.names import asset_name
from sr_assets.settings.native_streams import NativeStreamBlock, UpstreamBlock


def refuse_contradiction(stream: NativeStreamBlock) -> NativeStreamBlock:
    """Return a stream of `topology`; raises ValueError with the first contradiction in it."""
    upstreams = filter(None, [stream.mirror, *stream.sources])
    for rules in (_stream_contradictions(stream), *map(_upstream_contradictions, upstreams)):
        for contradicted, message in rules:
            if contradicted:
                raise ValueError(message)
    return stream


def _stream_contradictions(block: NativeStreamBlock) -> Iterator[tuple[bool, str]]:
    """Yield each rule about the keys of one stream: whether it is broken, and the message."""
    yield block.mirror is not None and bool(block.sources), "mirror, sources: a stream has either one mirror or sources"
    yield (
        block.mirror is not None and block.subjects is not None,
        ("mirror, subjects: a mirror stores no messages of its own; remove subjects, or use sources"),
    )
    yield (
        block.mirror is not None and block.duplicate_window is not None,
        ("mirror, duplicate_window: a mirror does not detect duplicates; remove duplicate_window"),
    )
    yield block.mirror is None and bool(block.mirror_direct), "mirror_direct: needs mirror"
    yield (
        bool(block.deny_purge and block.allow_rollup),
        "deny_purge, allow_rollup: a rollup purges messages; set one of them to false",
    )
    yield not (block.mirror or block.sources or block.subjects), "needs mirror, sources or subjects"
    window, age = block.duplicate_window, block.max_age
    yield bool(window and age) and window > age, "duplicate_window: must not be longer than max_age"  # type: ignore[operator]
    yield from _overlapping(block.subjects or (), "subjects")
    named = Counter(_identity(source) for source in block.sources)
    for source in block.sources:
        twice = named[_identity(source)] > 1
        yield twice, f"sources: {source.stream!r} appears twice with the same filter; give each another filter"


def _upstream_contradictions(block: UpstreamBlock) -> Iterator[tuple[bool, str]]:
    """Yield each rule about the keys of one mirror or source: whether it is broken, and the message."""
    yield (
        block.filter_subject is not None and bool(block.subject_transforms),
        ("filter_subject, subject_transforms: use one of them; the src of a transform is a filter"),
    )
    yield (
        block.start_sequence is not None and block.start_time is not None,
        ("start_sequence, start_time: exclude each other; use one"),
    )
    yield block.deliver_prefix is not None and block.api_prefix is None, "deliver_prefix: needs api_prefix"
    yield from _overlapping([transform.src for transform in block.subject_transforms], "subject_transforms")


def refuse_same_streams(wanted: Sequence[WantedStream]) -> None:
    """Refuse streams that are equal or have equal asset keys."""
    keys: dict[tuple[str, str], str] = {}
    for stream in wanted:
        key = asset_name(stream.cluster), asset_name(stream.stream)
        other = keys.setdefault(key, stream.label)
        if other != stream.label:
            raise ValueError(f"streams: {other!r} and {stream.label!r} get the same asset key; rename one")
    for label, count in Counter(stream.label for stream in wanted).items():
        if count > 1:
            raise ValueError(f"streams: {label!r} appears twice; merge the entries")


def refuse_loops(wanted: Iterable[WantedStream]) -> None:
    """Refuse links that form a loop, in which messages would circulate."""
    links = [
        (upstream, (upstream.cluster, upstream.stream), (stream.cluster, stream.stream))
        for stream in wanted
        for upstream in stream.upstreams
    ]
    after = {
        index: [
            other for other, (upstream, origin, _) in enumerate(links) if origin == copy and _passes(link, upstream)
        ]
        for index, (link, _, copy) in enumerate(links)
    }
    for start in after:
        path = _way_back(start, after)
        if path:
            names = [f"{links[index][1][0]}/{links[index][1][1]}" for index in path]
            raise ValueError(
                f"streams: {' → '.join([*names, names[0]])}: the links form a loop; remove one or filter it"
            )


def _way_back(start: int, after: dict[int, list[int]]) -> list[int]:
    """Return a path from a link back to itself over consecutive links, or an empty one."""
    ways = [[start]]
    seen = set()
    while ways:
        way = ways.pop()
        for following in after[way[-1]]:
            if following == start:
                return way
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return []


def _passes(link: Upstream, following: Upstream) -> bool:
    """Return whether the next link may copy a message of one link."""
    return any(subjects.overlaps(output, other) for output in link.outputs for other in following.inputs)


def _overlapping(patterns: Sequence[str], key: str) -> Iterator[tuple[bool, str]]:
    for index, pattern in enumerate(patterns):
        for other in patterns[index + 1 :]:
            yield subjects.overlaps(pattern, other), f"{key}: {pattern!r} and {other!r} overlap; make them distinct"


def _identity(source: UpstreamBlock) -> tuple[object, ...]:
    transforms = tuple((transform.src, transform.dest) for transform in source.subject_transforms)
    return source.stream, source.cluster, source.filter_subject, transforms, source.api_prefix
