"""Preparation of a stream's target: a missing target is created, and an unsuitable one refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sr_assets.adapters.jetstream import SUBJECTS_TAKEN, ApiError
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.provenance import Identity, doubled_text, foreign_copy
from sr_assets.domain.subjects import overlaps
from sr_assets.domain.target_stream import target_config

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.settings import StreamSettings

logger = logging.getLogger(__name__)


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


def create_target(stream: StreamSettings, source: StreamInfo, target: Cluster) -> StreamInfo:
    """Create the missing target, log its configuration, and return its info."""
    config = new_target(stream, source)
    try:
        info = target.create_stream(config)
    except ApiError as error:
        if error.code != SUBJECTS_TAKEN:
            raise
        raise RunError(
            f"target stream {stream.target_stream} cannot be created on {stream.target.label}: another stream there takes"
            f" {', '.join(config['subjects'])}; set another target_subject_prefix, or target_stream to that stream"
        ) from None
    shown = ", ".join(f"{key} {value}" for key, value in config.items() if key != "name")
    logger.info(
        "%s: created target stream %s on %s: %s", stream.label, stream.target_stream, stream.target.label, shown
    )
    return info


def new_target(stream: StreamSettings, source: StreamInfo) -> dict[str, Any]:
    """Return the configuration of a new target.

    Raises RunError if the source has no subjects (a mirror without a filter), and ConfigurationError if a rewritten
    subject is invalid.
    """
    patterns = [stream.filter_subject] if stream.filter_subject else source.subjects
    if not patterns:
        raise RunError(
            f"stream {stream.label}: the source has no subjects, like every mirror; create target stream "
            f"{stream.target_stream} yourself or set filter_subject"
        )
    rewritten = [stream.target_pattern(pattern) for pattern in patterns]
    return target_config(stream.target_stream, rewritten, source.config, stream.target_options)


def target_drift(stream: StreamSettings, info: StreamInfo) -> list[str]:
    """Return the differences between the target and the block `target`; sr-assets does not change them."""
    return stream.target_options.drift(info.config) if stream.target_options else []


def refuse_drift(stream: StreamSettings, info: StreamInfo) -> str:
    """Return a text for a target without differences from the block `target`; raises RunError with the differences."""
    drift = target_drift(stream, info)
    if drift:
        raise RunError(f"target stream {info.stream} has {'; '.join(drift)}; change it, or the block target")
    return "nothing differs"


def refuse_doubled(stream: StreamSettings, source: StreamInfo, target: Cluster) -> str:
    """Return a text if the target's newest message is not another entry's copy of the same source; else raise RunError."""
    newest = target.last_message(stream.target_stream)
    identity = Identity(stream.stream, stream.replicator, stream.name)
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
    patterns = [stream.filter_subject] if stream.filter_subject else list(source.subjects)
    rewritten = [stream.target_pattern(pattern) for pattern in patterns]
    if rewritten and not any(overlaps(theirs, ours) for ours in rewritten for theirs in info.subjects):
        raise RunError(
            f"target stream {stream.target_stream} takes {', '.join(info.subjects)}, but the copies' subject is"
            f" {', '.join(rewritten)}; add that to its subjects, or change target_subject_prefix or"
            " target_subject_remove"
        )
