"""Contradictions between keys that are valid alone: in one entry, and between entries.

Each function raises ValueError with the message about the first contradiction.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from sr_assets.domain import subjects
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.names import asset_name, rewritten
from sr_assets.settings.partitions import NUMBER
from sr_assets.settings.streams import StreamSettings
from sr_assets.settings.values import shown

_EXTRACTORS = "one of inspect_field, inspect_header or inspect_subject_token"


def refuse_contradiction(entry: StreamSettings) -> StreamSettings:
    """Return a stream; raises ValueError with the first contradiction in it."""
    divided = _partition_contradictions(entry) if entry.partitions else ()
    for contradicted, message in (*_sampling_contradictions(entry), *divided, *_copying_contradictions(entry)):
        if contradicted:
            raise ValueError(message)
    _refuse_loop(entry, rewritten(entry.filter_subject or ">", entry.prefix, entry.remove))
    _refuse_advisory_into_source(entry)
    return entry


def refuse_same_names(pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse a file without entries, and (name, stream) pairs that are equal or yield equal folder or asset names."""
    if not pairs:
        raise ValueError("streams: is empty; add a stream or a feed")
    sites: dict[str, dict[str, None]] = defaultdict(dict)
    for name, stream in pairs:
        if stream in sites[name]:
            raise ValueError(f"stream {stream!r} (name {name!r}): appears twice; give one entry another name")
        sites[name][stream] = None
    _refuse_collision(sites, "name", "share a folder on a case-insensitive disk", _folder)
    _refuse_collision(sites, "name", "get the same asset group, job and sensor", asset_name)
    for site, streams in sites.items():
        _refuse_collision(streams, f"name {site!r}: stream", "get the same asset keys", asset_name)


def _sampling_contradictions(entry: StreamSettings) -> Iterable[tuple[bool, str]]:
    modes = [key for key in ("inspect_field", "inspect_header", "inspect_subject_token") if getattr(entry, key)]
    sampled, interval, warning = bool(modes), entry.inspect_duration_ns, entry.warn_duration_ns
    yield len(modes) > 1, f"{' and '.join(modes)} exclude each other; keep one way to find the sender"
    yield sampled and interval is None, f"{''.join(modes[:1])}: needs inspect_duration, the copy interval"
    yield not sampled and interval is not None, f"inspect_duration: needs {_EXTRACTORS} to find the sender"
    for key in (
        "warn_duration",
        "inspect_force_field",
        "size_trigger",
        "advisory",
        "retired_retention",
        "purge_after",
        "classes",
    ):
        value = getattr(entry, entry.keys()[key])
        yield value not in (None, 0) and not sampled, f"{key}: needs sampling with inspect_duration and {_EXTRACTORS}"
    if warning is not None and interval is not None:
        both = f"{warning / SECOND_NS:g}s must be shorter than inspect_duration ({interval / SECOND_NS:g}s)"
        yield warning >= interval, f"warn_duration: {both}"
    if interval is not None:
        yield interval < 2, f"inspect_duration: {interval} ns is too short; use a longer one, such as 1s"
    yield entry.target_initiated and sampled, "target_initiated: cannot be used with sampling; remove it"
    # Each start would announce every node again, from messages that are long past.
    yield entry.ephemeral and sampled, f"ephemeral: cannot be used with {''.join(modes[:1])}; remove one of them"


def _copying_contradictions(entry: StreamSettings) -> Iterable[tuple[bool, str]]:
    order, both = entry.order, None not in (entry.creates_target, entry.no_target_create)
    yield entry.target_initiated and entry.max_age_ns is not None, "target_initiated: cannot be used with max_age"
    yield both and entry.creates_target == entry.no_target_create, "create_target: contradicts no_target_create"
    unused = entry.target_block is not None and not entry.create_target
    yield unused, "target: configures a new target, but no_target_create forbids creating one; remove one of them"
    yield entry.workers > 1 and order == "stream", "order: 'stream' needs workers: 1; use sender or none"
    no_sender = entry.workers > 1 and order == "sender" and entry.extractor is None
    yield no_sender, f"order: 'sender' (the default when workers > 1) needs {_EXTRACTORS}; or set order: none"


def _partition_contradictions(entry: StreamSettings) -> Iterable[tuple[bool, str]]:
    divided = "cannot be used with partitions"
    several = (
        f"stream: {shown(entry.stream)} names several streams, which have no common order; combine them in a native stream"
        " with sources (topology), and divide that stream with partitions"
    )
    yield NUMBER in entry.stream, several
    selected = (
        f"filter_subject: {shown(entry.filter_subject)} {divided}, whose filters are the subjects to read; remove it"
    )
    yield entry.filter_subject is not None, selected
    yield entry.workers > 1, f"workers: {entry.workers} {divided}, which have a writer each; remove it"
    in_order = len(entry.lanes) > 1 and entry.named_order == "stream"
    yield in_order, f"order: 'stream' {divided}, which keep each sender's order; use sender or none"


def _refuse_loop(entry: StreamSettings, pattern: str) -> None:
    """Refuse to copy a stream into itself, directly or through the target's subjects, as far as the keys show."""
    source, target = entry.source, entry.target
    if not source.shares_subjects(target):
        return
    where = f"is the cluster of source_url ({entry.source_url.label})"
    if source.same_as(target) and entry.target_stream == entry.stream:
        raise ValueError(f"target_url: {where}, so {entry.stream!r} would be copied into itself; set target_stream")
    # A filter of everything does not show the source's subjects; unrewritten subjects always overlap.
    known = entry.filter_subject not in (None, ">")
    if pattern == (entry.filter_subject or ">") or (known and subjects.overlaps(pattern, entry.filter_subject or "")):
        raise ValueError(
            f"target_url: {where} and the subjects of both streams overlap ({shown(pattern)}); "
            "set target_subject_prefix or target_subject_remove so that they do not"
        )


def _refuse_advisory_into_source(entry: StreamSettings) -> None:
    if entry.advisory is None or entry.advisory.cluster == "target" or entry.filter_subject in (None, ">"):
        return
    templates = {"subject": entry.advisory.subject, "observer_subject": entry.advisory.observer_subject}
    for key, template in templates.items():
        # A sender may be several tokens, so any tokens may follow from its token on.
        head, sender, _ = (template or "").partition("%v")
        tokens = [*head.split(".")[:-1], ">"] if sender else head.split(".")
        pattern = ".".join("*" if "%s" in token else token for token in tokens)
        if template and subjects.overlaps(pattern, entry.filter_subject or ""):
            raise ValueError(
                f"advisory.{key}: {shown(template)} belongs to the tracked source stream itself "
                f"(filter_subject {shown(entry.filter_subject)}); use another subject"
            )


def _folder(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _refuse_collision(values: Iterable[str], key: str, consequence: str, derive: Callable[[str], str]) -> None:
    """Refuse two values of a key that yield the same folder or asset name."""
    first: dict[str, str] = {}
    for value in values:
        other = first.setdefault(derive(value), value)
        if other != value:
            raise ValueError(f"{key}: {other!r} and {value!r} {consequence}; rename one")
