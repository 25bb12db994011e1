"""Requirements on a source: it must be readable by sequence without being changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.subjects import advisory_pattern, overlaps

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.settings import Entry


def check_source(stream: Entry, source: StreamInfo) -> None:
    """Refuse a source that cannot be read by sequence without being changed, or that takes its own advisories."""
    if source.retention != "limits":
        raise RunError(
            f"source stream {stream.stream} has retention {source.retention}, so reading would compete with its"
            " consumers; copy a stream with limits retention (for example a mirror of it)"
        )
    if stream.advisory is not None and stream.advisory.cluster == "source":
        for key, subject in (
            ("subject", stream.advisory.subject),
            ("observer_subject", stream.advisory.observer_subject),
        ):
            overlapping = [pattern for pattern in source.subjects if overlaps(pattern, advisory_pattern(subject))]
            if overlapping:
                raise ConfigurationError(
                    f"stream {stream.label}: advisory.{key} {subject!r} belongs to the source stream"
                    f" itself (subject {overlapping[0]}); choose another"
                )
