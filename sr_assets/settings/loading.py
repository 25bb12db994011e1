"""Loading the Settings: the only reader of the file and the environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.sizing import MAX_FOLD_MESSAGES
from sr_assets.domain.subjects import observer_subject
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings.clusters import parse_cluster
from sr_assets.settings.document import read_tree, refuse, with_environment
from sr_assets.settings.file import RawFile
from sr_assets.settings.links import RawTls, with_security
from sr_assets.settings.monitoring import MetricsSettings
from sr_assets.settings.notify import notify_settings
from sr_assets.settings.records import (
    AdvisorySettings,
    FeedSettings,
    SensorSettings,
    Settings,
    Start,
    StreamSettings,
)
from sr_assets.settings.shape import RawFeed, RawStream
from sr_assets.settings.spark import SparkSettings

DEFAULT_CONFIG = Path("conf/replication.yaml")


def load_settings(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read and check the configuration: `path`, else SR_ASSETS_CONFIG, else `conf/replication.yaml`.

    Raises ConfigurationError in one line with the file, the stream, the key and the allowed values; of several errors
    it shows the first and counts the others. It shows no URL and no part of one.
    """
    path = path or Path(environ.get("SR_ASSETS_CONFIG") or DEFAULT_CONFIG)
    tree = read_tree(path)
    try:
        raw = RawFile.model_validate(
            with_environment(tree, environ, lambda loc, problem: refuse(path, tree, loc, problem))
        )
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        refuse(path, tree, problems[0]["loc"], _problem(problems[0]) + more)
    return _settings(raw, environ)


def load_cluster(
    url: str, tls: Mapping[str, str | None], environ: Mapping[str, str] = os.environ, *, named: str = "--url"
) -> ClusterSettings:
    """Return the cluster of a URL and a `tls` block (ca, cert, key) given without a file.

    `named` is the option of the URL, for an error. The environment replaces `${NAME}`, as in a file. Raises
    ConfigurationError in one line without any part of the URL.
    """

    def refuse_url(_: object, problem: str) -> NoReturn:
        raise ConfigurationError(f"{named}: {problem}")

    try:
        cluster = parse_cluster(with_environment(url, environ, refuse_url))
    except ValueError as error:
        refuse_url((), str(error))
    try:
        return with_security(cluster, [RawTls.model_validate(dict(tls))])
    except ValidationError as error:
        raise ConfigurationError(f"--ca, --cert, --key: {_problem(error.errors(include_url=False)[0])}") from None


def _problem(error: Mapping[str, Any]) -> str:
    """Return the message for a value that pydantic refused; messages of our validators stay unchanged."""
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is required"
        case "list_type":
            return "must be a list, each entry beginning with '- '"
        case "too_short":
            return "is empty; add at least one entry"
        case "dict_type":
            return "must be a mapping of keys to values"
    return str(error["msg"])


def _settings(raw: RawFile, environ: Mapping[str, str]) -> Settings:
    home = environ.get("SR_ASSETS_HOME") or raw.state_store or ".sr_assets"
    return Settings(
        replicator=raw.name,
        home=Path.cwd() / Path(home).expanduser(),
        streams=tuple(_stream(entry, raw) for entry in raw.streams),
        feeds=tuple(_feed(feed, raw) for feed in raw.feeds),
        spark=SparkSettings(**raw.spark.model_dump()),
        sensor=SensorSettings(raw.sensor.interval, raw.sensor.lag_messages, raw.sensor.lag_seconds),
        run_budget_ns=raw.run_budget,
        linger_ns=2 * raw.sensor.interval if raw.linger is None else raw.linger,
        concurrency=raw.concurrency or os.cpu_count() or 1,
        snapshots_retention_ns=raw.snapshots.retention,
        advisories_retention_ns=raw.advisories.retention,
        gaps_retention_ns=raw.gaps.retention,
        availability=raw.availability.settings,
        inventory=raw.inventory.settings,
        inventory_facts=raw.inventory.facts,
        loglevel=raw.loglevel,
        logfile=raw.logfile,
        log_format=raw.log_format,
        metrics=_metrics(raw),
        notify=tuple(notify_settings(entry, number) for number, entry in enumerate(raw.notify, 1)),
        published_mode=raw.published_mode,
        topology=raw.topology.settings(raw) if raw.topology else None,
        heartbeats=raw.heartbeats.settings if raw.heartbeats else None,
        warnings=_warnings(raw) + _verified(raw),
    )


def _stream(raw: RawStream, top: RawFile) -> StreamSettings:
    return StreamSettings(
        replicator=top.name,
        name=raw.name or top.name,
        stream=raw.stream,
        source=raw.source_link(top),
        target=raw.target_link(top),
        target_stream=raw.target_stream or raw.stream,
        prefix=raw.target_subject_prefix,
        remove=raw.target_subject_remove,
        filter_subject=raw.filter_subject,
        start=_start(raw),
        max_age_ns=raw.max_age,
        extractor=raw.extractor,
        force_path=raw.inspect_force_field,
        policy=_policy(raw),
        advisory=_advisory(raw, top.name),
        workers=raw.workers,
        order=raw.effective_order,
        on_source_reset=raw.on_source_reset,
        on_target_reset=raw.on_target_reset,
        on_poison=raw.on_poison,
        batch_messages=raw.batch_messages,
        catch_up_messages=_catch_up_messages(raw, top),
        batch_bytes=raw.batch_bytes,
        create_target=not raw.no_target_create if raw.create_target is None else raw.create_target,
        ephemeral=raw.ephemeral,
        target_options=raw.target.options if raw.target else None,
        retired_retention_ns=raw.retired_retention,
    )


def _feed(raw: RawFeed, top: RawFile) -> FeedSettings:
    return FeedSettings(
        name=raw.name or top.name,
        stream=raw.stream,
        source=raw.source_link(top),
        filter_subject=raw.filter_subject,
        start=_start(raw),
        on_source_reset=raw.on_source_reset,
        batch_messages=raw.batch_messages,
        batch_bytes=raw.batch_bytes,
        retired_retention_ns=raw.retired_retention,
    )


def _advisory(raw: RawStream, replicator: str) -> AdvisorySettings | None:
    advisory = raw.advisory
    if advisory is None:
        return None
    observer = observer_subject(advisory.observer_subject, replicator, raw.name or replicator, raw.stream)
    return AdvisorySettings(advisory.subject, advisory.reliable, advisory.cluster, observer, advisory.format)


def _catch_up_messages(raw: RawStream, top: RawFile) -> int:
    """Return the largest batch of a stream that is far behind; `batch_messages`, set alone, bounds every batch."""
    named = raw.catch_up_messages or top.catch_up_messages
    if named is None:
        named = raw.batch_messages if "batch_messages" in raw.model_fields_set else MAX_FOLD_MESSAGES
    return max(raw.batch_messages, named)


def _start(raw: RawStream | RawFeed) -> Start:
    """Return the start option; the first one set applies, in the Stream Replicator's order."""
    if raw.start_at_end:
        return Start("end")
    if raw.start_sequence:
        return Start("sequence", raw.start_sequence)
    if raw.start_delta is not None:
        return Start("delta", raw.start_delta)
    return Start("all") if raw.start_time is None else Start("time", raw.start_time)


def _policy(raw: RawStream) -> Policy | None:
    if raw.inspect_duration is None:
        return None
    warning_ns = raw.inspect_duration // 2 if raw.warn_duration is None else raw.warn_duration
    return Policy(raw.inspect_duration, warning_ns, raw.size_trigger or 0)


def _metrics(raw: RawFile) -> MetricsSettings:
    """Return the metrics settings; port 0 means none, as in the Stream Replicator's file."""
    port = raw.metrics.port or raw.monitor_port or None
    return MetricsSettings(port, raw.metrics.host, raw.metrics.legacy, raw.metrics.textfile)


def _verified(raw: RawFile) -> tuple[str, ...]:
    """Return a warning about the links with `choria` whose server the Stream Replicator would not verify."""
    links = [link for entry in raw.streams for link in (entry.source_link(raw), entry.target_link(raw))]
    links += [feed.source_link(raw) for feed in raw.feeds]
    named = [link.label for link in links if link.choria and link.tls and not link.tls.ca and not link.tls.insecure]
    if not named:
        return ()
    verified = "the server's certificate is verified, against the system's CAs"
    before = "the Stream Replicator does not verify it without tls.cert"
    remedy = "set its CA in tls.ca, or insecure=true in the URL"
    return (f"choria without tls.ca ({', '.join(dict.fromkeys(named))}): {verified}; {before}: {remedy}",)


def _warnings(raw: RawFile) -> tuple[str, ...]:
    patient = [entry.stream for entry in raw.streams if entry.target_initiated]
    notes = (
        (raw.profiling, "profiling has no effect: there is no profiler"),
        (
            raw.heartbeats and raw.heartbeats.leader_election,
            "heartbeats.leader_election has no effect: this host publishes",
        ),
        (patient, f"target_initiated has no effect ({', '.join(patient)}); copying always tolerates latency"),
    )
    return tuple(note for condition, note in notes if condition)
