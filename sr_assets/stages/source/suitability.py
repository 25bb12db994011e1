"""The requirements on a source: one that cannot be read by sequence without changing it is refused.

Not here: what a target must be like (`replication.target`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.subjects import advisory_pattern, overlaps

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.settings import Entry


def check_source(stream: Entry, source: StreamInfo) -> None:
    """Refuse a source that cannot be read by sequence without changing it, or that takes its own advisories."""
    if source.retention != "limits":
        raise RunError(
            f"source stream {stream.stream} has retention {source.retention}: reading it would compete with its"
            " consumers; copy a stream with limits retention (for example a mirror of it)"
        )
    if stream.advisory is not None and stream.advisory.cluster == "source":
        for key, subject in (
            ("subject", stream.advisory.subject),
            ("observer_subject", stream.advisory.observer_subject),
        ):
            taken = [pattern for pattern in source.subjects if overlaps(pattern, advisory_pattern(subject))]
            if taken:
                raise ConfigurationError(
                    f"stream {stream.label}: advisory.{key} {subject!r} is taken by the source stream"
                    f" itself (subject {taken[0]}); choose another"
                )
