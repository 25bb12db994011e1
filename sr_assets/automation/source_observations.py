"""Observations of the source streams, which others write: Dagster plots their position, lag and age."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.status_file import StreamStatus, read_status
from sr_assets.assets.specs import has_source, stream_key
from sr_assets.automation.decisions import SourceNow, unread_messages
from sr_assets.automation.observing import StreamInfoCache
from sr_assets.domain.errors import RunError
from sr_assets.settings import Settings

_SHORTEST_SECONDS: Final = 60.0
#: An observation takes 2 KiB and 8 ms of Dagster's storage, so all sources together have at most one in this time.
_SECONDS_PER_SOURCE: Final = 5.0

#: For each observed source, by the entry's label: when (monotonic seconds), and the numbers that a change shows in.
Observed = Mapping[str, tuple[float, list[int]]]


def observe_sources(
    settings: Settings, site: str, stream_infos: StreamInfoCache, observed: Observed
) -> tuple[list[dg.AssetObservation], Observed]:
    """Return observations of a site's sources that have changed, and the new `observed`.

    A source is observed at most once a minute, with many sources less often. One that does not respond is left out. It may
    hold messages that the filter of its entry excludes.
    """
    now, interval = times.monotonic(), max(_SHORTEST_SECONDS, _SECONDS_PER_SOURCE * len(settings.entries))
    events, latest = [], dict[str, tuple[float, list[int]]]()
    for entry in settings.sites[site]:
        at, numbers = latest[entry.label] = observed.get(entry.label, (-interval, []))
        # A reboot begins the monotonic time again.
        if 0 <= now - at < interval or not has_source(settings, entry):
            continue
        with contextlib.suppress(RunError):
            info = stream_infos.recent(entry)
            metadata = _metadata(info, read_status(settings.home / "sites" / site).of(entry.stream))
            before, numbers = numbers, [info.created_ns, info.last_sequence, metadata["lag_messages"]]
            if numbers != before:
                events.append(dg.AssetObservation(stream_key(settings, entry, "source"), metadata=metadata))
        latest[entry.label] = (now, numbers)
    return events, latest


def _metadata(info: StreamInfo, status: StreamStatus) -> dict[str, Any]:
    """Return the numbers of a source now; `age_seconds` is the age of its newest message by the server's clock."""
    source = SourceNow(info.created_ns, info.first_sequence, info.last_sequence)
    # Before the first run the position is the start of the source.
    metadata: dict[str, Any] = {
        "first_sequence": info.first_sequence,
        "last_sequence": info.last_sequence,
        "messages": info.messages,
        "bytes": info.bytes,
        "lag_messages": max(0, unread_messages(status, source)),
    }
    if status.begun:
        metadata["next_sequence"] = status.next_sequence
    if info.messages and info.last_stored_ns is not None:
        metadata["newest_message"] = dg.MetadataValue.timestamp(info.last_stored_ns / 1e9)
        if info.ts_ns is not None:
            metadata["age_seconds"] = round(max(0, info.ts_ns - info.last_stored_ns) / 1e9, 1)
    return metadata
