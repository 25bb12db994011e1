"""The current lag of each stream: the position in its status compared with the source's stream info."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.status_file import StreamStatus, read_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import ClusterSettings, Entry, Settings

_LINKS = 16


@dataclass(frozen=True, slots=True)
class Lag:
    """The current lag of one stream; `position` is the last processed sequence, or None before the first run.

    `messages` is None if only a run can find the start. `problem` is the reason why the source is unreachable, a
    recreated source, or the last run's failure.
    """

    name: str
    stream: str
    position: int | None
    source_last_sequence: int | None = None
    messages: int | None = None
    seconds: float | None = None
    problem: str | None = None

    @property
    def unknown(self) -> bool:
        """Whether the source is unreachable."""
        return self.source_last_sequence is None


def measure_lag(settings: Settings) -> list[Lag]:
    """Query every source, in parallel over one connection each; return the streams in the order of the file."""
    sources = dict.fromkeys(stream.source for stream in settings.entries)
    with ThreadPoolExecutor(min(_LINKS, len(sources) or 1)) as pool:
        measured = pool.map(lambda source: _ask_source(settings, source), sources)
    lags = {(lag.name, lag.stream): lag for lags_of_source in measured for lag in lags_of_source}
    return [lags[stream.name, stream.stream] for stream in settings.entries]


def _ask_source(settings: Settings, source: ClusterSettings) -> list[Lag]:
    with closing(Cluster(source, "sr-assets lag")) as cluster:
        return [_measure(settings, cluster, stream) for stream in settings.entries if stream.source == source]


def _measure(settings: Settings, cluster: Cluster, stream: Entry) -> Lag:
    status = read_status(settings.home / "sites" / stream.name).of(stream.stream)
    position = _position(status)
    try:
        return compare_with_source(cluster, stream, cluster.stream_info(stream.stream), status)
    except SrAssetsError as error:
        return Lag(stream.name, stream.stream, position, problem=str(error))


def compare_with_source(cluster: Cluster, stream: Entry, info: StreamInfo, status: StreamStatus) -> Lag:
    """Return the lag according to a source's info; `status` is the stream's last one."""
    position = _position(status)
    renewed = position is not None and status.created_ns != info.created_ns
    problem = f"the source was recreated (on_source_reset: {stream.on_source_reset})" if renewed else status.last_error
    begin = None if renewed else position + 1 if position is not None else _begin(stream, info)
    if begin is None:
        return Lag(stream.name, stream.stream, position, info.last_sequence, problem=problem)
    begin = max(begin, info.first_sequence)
    messages = max(0, info.last_sequence + 1 - begin)
    seconds: float | None = 0.0
    if messages and (unread := cluster.next_message(stream.stream, begin, stream.filter_subject or ">")) is not None:
        # Servers before 2.10 do not send their time.
        seconds = None if info.ts_ns is None else max(0.0, round((info.ts_ns - unread.stored_ns) / 1e9, 3))
    return Lag(stream.name, stream.stream, position, info.last_sequence, messages, seconds, problem)


def _position(status: StreamStatus) -> int | None:
    return status.next_sequence - 1 if status.begun else None


def _begin(stream: Entry, info: StreamInfo) -> int | None:
    """Return the first sequence of a first run, or None if the stream info does not determine it."""
    positions = {"all": 1, "end": info.last_sequence + 1, "sequence": stream.start.value}
    return positions.get(stream.start.kind)
