"""The whole configuration file: its top level, and the checks across its entries."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from sr_assets.settings.contradictions import refuse_contradiction, refuse_same_names
from sr_assets.settings.daily import RawAvailability, RawInventory
from sr_assets.settings.heartbeats import RawHeartbeats
from sr_assets.settings.links import RawChoria, RawTls
from sr_assets.settings.mapping import Raw
from sr_assets.settings.notify import RawNotify, refuse_unknown_sites
from sr_assets.settings.shape import (
    CatchUp,
    Duration,
    RawFeed,
    RawHistory,
    RawMetrics,
    RawSensor,
    RawSpark,
    RawStream,
    SiteName,
    Span,
)
from sr_assets.settings.topology import RawTopology
from sr_assets.settings.values import MINUTE_NS, one_of, read_file_mode, read_path, read_port, whole_number

File = Annotated[Path, BeforeValidator(read_path)]


class CheckedStream(RawStream):
    """An entry of `streams` without contradictory keys."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        refuse_contradiction(self)
        return self


class RawFile(Raw):
    """The whole file."""

    name: SiteName
    streams: list[CheckedStream] = Field(default_factory=list)
    feeds: list[RawFeed] = Field(default_factory=list)
    state_store: File | None = None
    logfile: File | None = None
    published_mode: Annotated[int, BeforeValidator(read_file_mode)] = 0o600
    loglevel: Annotated[
        Literal["debug", "info", "warn", "error"], BeforeValidator(one_of("debug", "info", "warn", "error"))
    ] = "info"
    log_format: Annotated[Literal["text", "json"], BeforeValidator(one_of("text", "json"))] = "text"
    monitor_port: Annotated[int, BeforeValidator(read_port)] | None = None
    metrics: RawMetrics = RawMetrics()
    notify: list[RawNotify] = Field(default_factory=list)
    profiling: Any = None
    spark: RawSpark = RawSpark()
    sensor: RawSensor = RawSensor()
    run_budget: Duration = 5 * MINUTE_NS
    linger: Span | None = None
    catch_up_messages: CatchUp | None = None
    concurrency: Annotated[int, BeforeValidator(whole_number(1))] | None = None
    snapshots: RawHistory = RawHistory()
    advisories: RawHistory = RawHistory()
    gaps: RawHistory = RawHistory()
    availability: RawAvailability = RawAvailability()
    inventory: RawInventory = RawInventory()
    topology: RawTopology | None = None
    tls: RawTls | None = None
    choria: RawChoria | None = None
    heartbeats: RawHeartbeats | None = None

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if "streams" not in self.model_fields_set and not (self.feeds or self.heartbeats or self.topology):
            raise ValueError("streams: is required")
        if self.monitor_port and self.metrics.port not in (None, self.monitor_port):
            raise ValueError(f"monitor_port: is {self.monitor_port}, metrics.port {self.metrics.port}; remove one")
        entries: list[RawStream | RawFeed] = [*self.streams, *self.feeds]
        if entries or not (self.heartbeats or self.topology):
            refuse_same_names([(entry.name or self.name, entry.stream) for entry in entries])
        for entry in entries:
            try:
                for link in (entry.source_link, *([entry.target_link] if isinstance(entry, RawStream) else [])):
                    link(self)
            except ValueError as error:
                raise ValueError(f"stream {entry.stream!r}: {error}") from None
        if self.heartbeats:
            try:
                _ = self.heartbeats.settings
            except ValueError as error:
                raise ValueError(f"heartbeats: {error}") from None
        if self.topology:
            try:
                self.topology.settings(self)
            except ValueError as error:
                raise ValueError(f"topology: {error}") from None
        refuse_unknown_sites(self.notify, {entry.name or self.name for entry in entries})
        return self
