"""Preparation of a stream's target: a missing target is created, and an unsuitable one refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.jetstream import INVALID_JSON, SUBJECTS_TAKEN, ApiError, PermissionDeniedError
from sr_assets.adapters.nats.administration import Cluster, TooManySubjectsError, held_subjects
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.messages import header_writer
from sr_assets.domain.provenance import doubled_text, foreign_copy
from sr_assets.domain.subjects import covers, matcher, overlaps, printable, stored_patterns
from sr_assets.domain.target_stream import target_config

if TYPE_CHECKING:
    from sr_assets.settings import StreamSettings

logger = logging.getLogger(__name__)

# The largest numbers in the headers of a copy.
_LAST_SEQUENCE: Final = (1 << 64) - 1
_MOST_RESTARTS: Final = 999_999
#: The first version of nats-server with `allow_batched`.
_FAST_INGEST: Final = (2, 14)
#: The first version with `persist_mode`; earlier ones ignore it.
_PERSIST_MODE: Final = (2, 12)


def prepare_target(stream: StreamSettings, source: StreamInfo, target: Cluster) -> StreamInfo | None:
    """Check the target and return its info, or None if it does not exist. Raises RunError for an unsuitable target."""
    info = target.find_stream(stream.target_stream)
    if info is not None:
        check_target(stream, source, info)
    elif not stream.create_target:
        raise RunError(
            f"target stream {stream.target_stream} does not exist on {stream.target.label}, and no_target_create, or"
            " create_target: false, is set; create the stream"
        )
    return info


def create_target(stream: StreamSettings, source: StreamInfo, source_cluster: Cluster, target: Cluster) -> StreamInfo:
    """Create the missing target, log its configuration, and return its info."""
    config = new_target(stream, source, source_cluster)
    if config.get("persist_mode") == "async" and target.server_version < _PERSIST_MODE:
        raise RunError(
            f"target stream {stream.target_stream} cannot be created: target.persist async needs nats-server 2.12 or later,"
            f" and {stream.target.label} is older; remove it"
        )
    if stream.allow_batched == "auto" and target.server_version >= _FAST_INGEST:
        config["allow_batched"] = True
    try:
        info = _create(target, config)
    except ApiError as error:
        if error.code != SUBJECTS_TAKEN:
            if stream.target_options is None:
                raise
            raise RunError(
                f"target stream {stream.target_stream} cannot be created: {error}; the block target sets"
                f" {stream.target_options.refused(error.description)}; change it, or omit it for the source's value"
            ) from None
        raise RunError(
            f"target stream {stream.target_stream} cannot be created on {stream.target.label}: another stream there takes"
            f" {', '.join(config['subjects'])}; set another target_subject_prefix, or target_stream to that stream"
        ) from None
    shown = ", ".join(f"{key} {value}" for key, value in config.items() if key != "name")
    logger.info(
        "%s: created target stream %s on %s: %s", stream.label, stream.target_stream, stream.target.label, shown
    )
    return info


def _create(target: Cluster, config: dict[str, Any]) -> StreamInfo:
    try:
        return target.create_stream(config)
    except ApiError as error:
        # The leader of a cluster of several versions may be older than our server.
        if error.code != INVALID_JSON or config.pop("allow_batched", None) is None:
            raise
    return target.create_stream(config)


def publishing_method(stream: StreamSettings, info: StreamInfo) -> str:
    """Return how copies are published into a target, and why not in batches."""
    if stream.allow_batched == "off":
        reason = "allow_batched is off"
    elif stream.writers > 1:
        reason = f"{stream.writers} writers write into it"
    elif not info.config.get("allow_batched"):
        reason = f"{info.stream} has no allow_batched (nats-server 2.14 or later)"
    elif stream.target.api_owner:
        reason = f"it is reached through {stream.target.api_owner}"
    else:
        return "fast-ingest batches"
    return f"one acknowledgement for each message: {reason}"


def new_target(stream: StreamSettings, source: StreamInfo, source_cluster: Cluster) -> dict[str, Any]:
    """Return the configuration of a new target, which accepts every subject that the source stores.

    Raises RunError if those subjects are unknown (an origin of the source in another account, or not readable), and
    ConfigurationError if a rewritten subject is invalid.
    """
    denied: list[str] = []
    # With a prefix, one pattern accepts every copy, whatever the source stores.
    patterns = _copied_patterns(stream, source, source_cluster, denied) or ((">",) if stream.prefix else ())
    if not patterns:
        reason = f" ({denied[0]})" if denied else ""
        raise RunError(
            f"stream {stream.label}: the subjects of the source's mirror or sources are unknown{reason}; create target"
            f" stream {stream.target_stream} yourself, or set filter_subject or target_subject_prefix"
        )
    rewritten = [stream.target_pattern(pattern) for pattern in patterns]
    subjects = stream.target_options.wanted.get("subjects", ()) if stream.target_options else ()
    for pattern in rewritten if subjects else ():
        if not any(covers(subject, pattern) for subject in subjects):
            raise ConfigurationError(
                f"stream {stream.label}: target.subjects {', '.join(subjects)} do not include {pattern}, a subject of the"
                " copies; add it, or set target_subject_prefix or filter_subject"
            )
    return target_config(stream.target_stream, rewritten, source.config, stream.target_options)


def copied_subjects(
    stream: StreamSettings, source: StreamInfo, source_cluster: Cluster, target: Cluster
) -> tuple[str, ...] | None:
    """Return patterns of the copies' subjects: the source's, else those of an existing target, or None if unknown."""
    patterns = _copied_patterns(stream, source, source_cluster) or ((">",) if stream.prefix else ())
    copies = tuple(map(stream.target_pattern, patterns))
    if copies and ">" not in copies:
        return copies
    info = target.find_stream(stream.target_stream)
    return info.subjects if info is not None and info.subjects else copies or None


def _copied_patterns(
    stream: StreamSettings, source: StreamInfo, cluster: Cluster | None, denied: list[str] | None = None
) -> tuple[str, ...] | None:
    """Return patterns of the copied messages' subjects; without a cluster, those of other streams are unknown.

    Append the errors about missing permissions to `denied`.
    """
    stored, wanted = _source_patterns(source, cluster, [] if denied is None else denied), stream.filter_subject
    if not wanted:
        return stored if stored or not stream.lanes else stream.lanes
    matching = tuple(pattern for pattern in stored or () if overlaps(pattern, wanted))
    # A stream that captures all subjects would need no_ack, so `>` becomes the source's own subjects.
    return matching if matching and all(covers(wanted, pattern) for pattern in matching) else (wanted,)


def _source_patterns(source: StreamInfo, cluster: Cluster | None, denied: list[str]) -> tuple[str, ...] | None:
    """Return patterns of the source's stored subjects, or None if they are unknown."""
    read = {source.stream}

    def upstream(origin: Mapping[str, Any]) -> tuple[str, ...] | None:
        name = str(origin.get("name"))
        if cluster is None or origin.get("external"):
            return None
        if name in read:
            return ()
        read.add(name)
        try:
            return stored_patterns(cluster.stream_info(name).config, upstream)
        except PermissionDeniedError as error:
            denied.append(str(error))
        except RunError:
            pass
        return None

    return stored_patterns(source.config, upstream)


def target_drift(stream: StreamSettings, info: StreamInfo) -> list[str]:
    """Return the differences between the target and the block `target`; sr-assets does not change them."""
    return stream.target_options.drift(info.config) if stream.target_options else []


def refuse_drift(stream: StreamSettings, info: StreamInfo) -> str:
    """Return a text for a target without differences from the block `target`; raises RunError with the differences."""
    drift = target_drift(stream, info)
    if drift:
        raise RunError(f"target stream {info.stream} has {'; '.join(drift)}; change it, or the block target")
    return "nothing differs"


def copies_pattern(stream: StreamSettings, info: StreamInfo) -> str | None:
    """Return a pattern of our copies' subjects in a target, or None for all subjects: it may rewrite them."""
    return None if info.config.get("subject_transform") else stream.copies_pattern


def refuse_doubled(stream: StreamSettings, source: StreamInfo, target: Cluster, info: StreamInfo) -> str:
    """Return a text if the newest possible copy in the target is not another entry's of the same source; else raise RunError.

    Copies of an entry with another filter have other subjects.
    """
    newest = target.last_message(stream.target_stream, copies_pattern(stream, info) or ">")
    identity = stream.identity
    other = foreign_copy(newest.headers, identity, source.created_ns) if newest else None
    if other is not None:
        raise RunError(doubled_text(stream.target_stream, identity, other))
    return "the newest message is not another entry's copy"


def check_target(stream: StreamSettings, source: StreamInfo, info: StreamInfo) -> None:
    """Refuse an existing target that cannot store the copies or cannot confirm them."""
    if info.no_ack:
        raise RunError(
            f"target stream {stream.target_stream} has no_ack, so writes cannot be confirmed; disable no_ack"
        )
    if info.sealed:
        raise RunError(f"target stream {stream.target_stream} is sealed and cannot be written; choose another target")
    if info.mirror:
        raise RunError(f"target stream {stream.target_stream} is a mirror and cannot be written; choose another target")
    if info.created_ns == source.created_ns and info.stream == source.stream and info.config == source.config:
        raise ConfigurationError(f"stream {stream.label}: source and target are the same stream; change one of them")
    rewritten = [stream.target_pattern(pattern) for pattern in _copied_patterns(stream, source, None) or ()]
    if rewritten and not any(overlaps(theirs, ours) for ours in rewritten for theirs in info.subjects):
        raise RunError(
            f"target stream {stream.target_stream} takes {', '.join(info.subjects)}, but the copies' subject is"
            f" {', '.join(rewritten)}; add that to its subjects, or change target_subject_prefix or"
            " target_subject_remove"
        )


def refuse_unstorable(stream: StreamSettings, source: StreamInfo, source_cluster: Cluster, info: StreamInfo) -> str:
    """Return a text if a target can store every message that the source holds; else raise RunError with the remedy."""
    takes, count, refused = matcher(info.subjects), 0, []
    try:
        held = list(held_subjects(source_cluster, stream.stream, stream.filter_subject or ">"))
    except TooManySubjectsError as error:
        return f"not compared: {error}"
    for subject in held:
        count += 1
        rewritten = stream.target_pattern(subject)
        if not takes(rewritten):
            refused.append(rewritten)
    if refused:
        raise RunError(
            f"target stream {stream.target_stream} does not take {printable(refused[0])}: it would refuse the copies of"
            f" {len(refused)} of {count} subjects; add them to its subjects, or set filter_subject"
        )
    limit_bytes = int(info.config.get("max_msg_size", -1))
    source_bytes = int(source.config.get("max_msg_size", -1))
    largest_bytes = (source_bytes if source_bytes > 0 else source_cluster.max_payload) + _added_bytes(stream, source)
    if 0 < limit_bytes < largest_bytes:
        raise RunError(
            f"target stream {stream.target_stream} has max_msg_size {limit_bytes}, but a copy can have {largest_bytes}"
            " bytes with its headers; raise max_msg_size, or set it to -1"
        )
    return f"{count} subjects, messages of up to {largest_bytes} bytes"


def _added_bytes(stream: StreamSettings, source: StreamInfo) -> int:
    """Return the size of the longest headers that a copy gets."""
    write = header_writer(stream.replicator, stream.name, stream.stream, source.created_ns)
    return len(write(b"", _LAST_SEQUENCE, source.created_ns, _MOST_RESTARTS))
