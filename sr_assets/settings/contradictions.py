"""Keys that are right alone and wrong together: within one stream's entry, and between the entries of a file.

Each function raises ValueError about the first contradiction it finds, in the words the user reads. Not here: what a
key may hold by itself (`values`, `names`), what only a server can tell.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sr_assets.domain import subjects
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.names import rewritten
from sr_assets.settings.records import asset_name
from sr_assets.settings.values import shown

if TYPE_CHECKING:
    from sr_assets.settings.shape import RawStream

_AN_EXTRACTOR = "one of inspect_field, inspect_header or inspect_subject_token"


def refuse_contradiction(entry: "RawStream") -> None:
    """Refuse an entry whose keys contradict each other."""
    for broken, message in (*_sampling_contradictions(entry), *_copying_contradictions(entry)):
        if broken:
            raise ValueError(message)
    _refuse_loop(
        entry, rewritten(entry.filter_subject or ">", entry.target_subject_prefix, entry.target_subject_remove)
    )
    _refuse_advisory_into_source(entry)


def refuse_same_names(pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse no entries at all, and entries whose (name, stream) pairs are, or become somewhere, the same."""
    if not pairs:
        raise ValueError("streams: is empty; at least one stream, or one feed, is needed")
    for place, (name, stream) in enumerate(pairs):
        if (name, stream) in pairs[:place]:
            raise ValueError(f"stream {stream!r} (name {name!r}): is there twice; give one entry another name")
    names = [name for name, _ in pairs]
    _refuse_collision(names, "name", "share a folder where case does not count", _folder)
    _refuse_collision(names, "name", "get the same asset group, job and sensor", asset_name)
    for site in dict.fromkeys(names):
        of_site = [stream for name, stream in pairs if name == site]
        _refuse_collision(of_site, f"name {site!r}: stream", "get the same asset keys", asset_name)


def _sampling_contradictions(entry: "RawStream") -> Iterable[tuple[bool, str]]:
    modes = [key for key in ("inspect_field", "inspect_header", "inspect_subject_token") if getattr(entry, key)]
    sampled, interval, warning = bool(modes), entry.inspect_duration, entry.warn_duration
    yield len(modes) > 1, f"{' and '.join(modes)}: only one way to find the sender can be used"
    yield sampled and interval is None, f"{''.join(modes[:1])}: needs inspect_duration to say how often to copy"
    yield not sampled and interval is not None, f"inspect_duration: needs {_AN_EXTRACTOR} to find the sender"
    for key in ("warn_duration", "inspect_force_field", "size_trigger", "advisory", "retired_retention"):
        alone = getattr(entry, key) is not None and not sampled
        yield alone and getattr(entry, key) != 0, f"{key}: needs sampling, that is inspect_duration and {_AN_EXTRACTOR}"
    if warning is not None and interval is not None:
        both = f"{warning / SECOND_NS:g}s must be shorter than inspect_duration ({interval / SECOND_NS:g}s)"
        yield warning >= interval, f"warn_duration: {both}"
    if interval is not None:
        yield interval < 2, "inspect_duration: must be longer"
    yield entry.target_initiated and sampled, "target_initiated: cannot be used with sampling; take it out"


def _copying_contradictions(entry: "RawStream") -> Iterable[tuple[bool, str]]:
    order, both = entry.effective_order, entry.create_target is not None and entry.no_target_create is not None
    yield entry.target_initiated and entry.max_age is not None, "target_initiated: cannot be used with max_age"
    yield both and entry.create_target == entry.no_target_create, "create_target: contradicts no_target_create"
    yield entry.workers > 1 and order == "stream", "order: 'stream' needs workers: 1; use sender or none"
    blind = entry.workers > 1 and order == "sender" and entry.extractor is None
    yield blind, f"order: 'sender' (the default when workers > 1) needs {_AN_EXTRACTOR}; or say order: none"


def _refuse_loop(entry: "RawStream", pattern: str) -> None:
    """Refuse to copy a stream into itself, by way of the target's subjects too, as far as the keys alone can tell."""
    if not entry.source.same_as(entry.target):
        return
    where = f"is the cluster of source_url ({entry.source_url.label})"
    if (entry.target_stream or entry.stream) == entry.stream:
        raise ValueError(f"target_url: {where}, so {entry.stream!r} would be copied into itself; set target_stream")
    # A filter of everything says nothing about what the source takes; subjects left as they are say it all.
    known = entry.filter_subject not in (None, ">")
    if pattern == (entry.filter_subject or ">") or (known and subjects.overlaps(pattern, entry.filter_subject or "")):
        raise ValueError(
            f"target_url: {where} and the subjects of both streams overlap ({shown(pattern)}); "
            "set target_subject_prefix or target_subject_remove so that they do not"
        )


def _refuse_advisory_into_source(entry: "RawStream") -> None:
    if entry.advisory is None or entry.advisory.cluster == "target" or entry.filter_subject in (None, ">"):
        return
    templates = {"subject": entry.advisory.subject, "observer_subject": entry.advisory.observer_subject}
    for key, template in templates.items():
        # A sender may be several tokens, so from its token on anything can follow.
        head, sender, _ = (template or "").partition("%v")
        tokens = [*head.split(".")[:-1], ">"] if sender else head.split(".")
        pattern = ".".join("*" if "%s" in token else token for token in tokens)
        if template and subjects.overlaps(pattern, entry.filter_subject or ""):
            raise ValueError(
                f"advisory.{key}: {shown(template)} is taken by the tracked source stream itself "
                f"(filter_subject {shown(entry.filter_subject)}); use another subject"
            )


def _folder(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _refuse_collision(values: Sequence[str], what: str, why: str, key: Callable[[str], str]) -> None:
    seen: dict[str, str] = {}
    for value in values:
        other = seen.setdefault(key(value), value)
        if other != value:
            raise ValueError(f"{what}: {other!r} and {value!r} {why}; rename one")
