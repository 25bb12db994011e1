"""Commands about streams: `check`, `lag`, `pause` and `resume`."""

from typing import TYPE_CHECKING

import click

from sr_assets.adapters.logs import print_error, print_warning
from sr_assets.cli.base import cli, configured, echo, form_option, note_action, stream_option
from sr_assets.cli.render import Format, print_note, show
from sr_assets.cli.warnings import hint, warn
from sr_assets.cli.watching import watchable
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import RunError
from sr_assets.domain.sizing import spark_rule
from sr_assets.operate.bars import progress_bars

if TYPE_CHECKING:
    from sr_assets.settings import FeedSettings, Settings, Start, StreamSettings

#: Number of nodes that `check` classifies.
_NEWEST = 1_000
_NO_COPY = "a feed makes no copies, so it cannot be paused"


@cli.command(epilog="Example: sr-assets check --connect")
@click.option("--connect", is_flag=True, help="Test every connection and permission without changing anything.")
@click.option("--explain", metavar="KEY", help="Show the value of a key, such as inspect_duration, and its origin.")
@form_option
@configured
def check(settings: "Settings", connect: bool, explain: str | None, form: Format) -> int:
    """Validate the configuration and print the planned work."""
    from sr_assets.adapters.spark.config import is_cluster
    from sr_assets.operate.instance import check_home

    warn(settings)
    hint(settings)
    check_home(settings.home)
    if explain:
        from sr_assets.cli.explaining import Explained
        from sr_assets.cli.explaining import explain as rows_of

        show(Explained._fields, rows_of(settings, explain), form)
        return 0
    if connect:
        return check_connectivity(settings, form)
    paused = _paused_labels(settings)
    classes = {stream.label: _classes(settings, stream) for stream in settings.streams if stream.node_classes}
    columns = ("name", "stream", "from", "to", "filter", "start", "sampling", "advisories", "paused", "classes")
    rows = [(*_stream_row(stream), stream.label in paused, classes.get(stream.label)) for stream in settings.streams]
    rows += [(*_feed_row(feed), False, None) for feed in settings.feeds]
    rows += [(*row, False, None) for row in _heartbeat_rows(settings)]
    title = f"replicator {settings.replicator}, home {settings.home}, Spark {settings.spark.public['mode']}"
    show(columns, rows, form, title=title)
    if form in ("table", "wide"):
        rule = spark_rule(settings.spark.from_messages, cluster=is_cluster(settings.spark.mode))
        print_note(f"in Spark: {rule}; else in the run's process")
    for label, counts in classes.items() if form in ("table", "wide") else ():
        print_note(
            f"classes of {label}: {counts or 'no node is known yet; `check --connect` reads the newest messages'}"
        )
    return 0


def _classes(settings: "Settings", stream: "StreamSettings") -> str | None:
    """Return how many of the newest published nodes each class of a stream matches, or None before the first publication."""
    from sr_assets.adapters.published.queries import newest_nodes
    from sr_assets.domain.classes import count_text

    assert stream.node_classes is not None
    try:
        nodes = newest_nodes(settings.home, stream.name, stream.stream, _NEWEST)
    except RunError:
        return None
    classifier = stream.node_classes.classifier
    return count_text(classifier.rules, [classifier.reclassify(*node) for node in nodes]) if nodes else None


@progress_bars()
def check_connectivity(settings: "Settings", form: Format) -> int:
    """Test every connection and permission, show each probe, and return the exit code."""
    from sr_assets.stages.connectivity import probe_connectivity

    probes = probe_connectivity(settings)
    rows = [
        (probe.stream, probe.cluster, probe.tried, "ok" if probe.works else "failed", probe.learned) for probe in probes
    ]
    show(
        ("stream", "cluster", "tried", "result", "learned"), rows, form, first=("stream", "tried", "result", "learned")
    )
    failed = [probe for probe in probes if not probe.works]
    for probe in failed:
        print_error(f"{probe.stream}: {probe.tried}: {probe.learned}")
    return int(bool(failed))


def _stream_row(stream: "StreamSettings") -> tuple[str | None, ...]:
    sampling = None
    if stream.policy is not None and stream.extractor is not None:
        interval, silent = duration(stream.policy.interval_ns / 1e9), duration(stream.policy.warning_ns / 1e9)
        sampling = f"by {stream.extractor.text} every {interval}, silent after {silent}"
    return (
        stream.name,
        stream.stream,
        stream.source.label,
        f"{stream.target.label} {stream.target_stream}",
        stream.filter_subject,
        _start(stream.start),
        sampling,
        stream.advisory.subject if stream.advisory else None,
    )


def _feed_row(feed: "FeedSettings") -> tuple[str | None, ...]:
    start, to = _start(feed.start), "the global view"
    return feed.name, feed.stream, feed.source.label, to, feed.filter_subject, start, None, None


def _heartbeat_rows(settings: "Settings") -> list[tuple[str | None, ...]]:
    beats = settings.heartbeats
    return [
        (
            settings.replicator,
            None,
            f"a heartbeat every {duration(heartbeat.interval_ns / 1e9)}",
            f"{beats.cluster.label} {heartbeat.subject}",
            *[None] * 4,
        )
        for heartbeat in (beats.subjects if beats else ())
        if beats
    ]


def _start(start: "Start") -> str:
    return start.kind if start.kind in ("all", "end") else f"{start.kind} {start.value}"


@cli.command(epilog="Example: sr-assets lag --watch 5s")
@watchable
def lag(settings: "Settings", form: Format) -> int:
    """Query the servers for the current lag of every stream.

    Exit code 1 if a source is unreachable.
    """
    from sr_assets.stages.source.lag import measure_lag

    lags, paused = measure_lag(settings), _paused_labels(settings)
    columns = ("name", "stream", "position", "source_last_sequence", "lag_messages", "lag_seconds", "problem", "paused")
    rows = [
        (
            lag.name,
            lag.stream,
            lag.position,
            lag.source_last_sequence,
            lag.messages,
            lag.seconds,
            lag.problem,
            f"{lag.name}/{lag.stream}" in paused,
        )
        for lag in lags
    ]
    show(columns, rows, form, first=("name", "stream", "lag_messages", "lag_seconds"))
    troubled = [lag for lag in lags if lag.problem is not None]
    for lag in troubled:
        (print_error if lag.unknown else print_warning)(f"{lag.name}/{lag.stream}: {lag.problem}")
    return int(any(lag.unknown for lag in troubled))


def _paused_labels(settings: "Settings") -> frozenset[str]:
    """Return the paused streams, as name/stream."""
    from sr_assets.adapters.state.operator_settings import paused_entries

    return frozenset(
        f"{site}/{stream}"
        for site, entries in settings.sites.items()
        for stream in paused_entries(settings.home / "sites" / site, entries)
    )


@cli.command(epilog="Example: sr-assets pause --stream NODES")
@stream_option
@configured
def pause(settings: "Settings", name: str) -> None:
    """Stop copying a stream until `resume`; tracking, tables and advisories continue."""
    from sr_assets.adapters.state.operator_settings import set_paused
    from sr_assets.adapters.state.orders import request_checkpoint

    stream = settings.stream_named(name, _NO_COPY)
    changed = set_paused(settings, stream, paused=True)
    if changed:
        note_action(settings, "pause", stream.label)
        request_checkpoint(settings, stream.name)
    effect = "its nodes are still tracked" if stream.tracked else "no messages are read"
    echo(f"{stream.label}: {'paused' if changed else 'already paused'}; {effect}")


@cli.command(epilog="Example: sr-assets resume --stream NODES")
@stream_option
@configured
def resume(settings: "Settings", name: str) -> None:
    """Resume the copying of a paused stream from its position."""
    from sr_assets.adapters.state.operator_settings import set_paused
    from sr_assets.adapters.state.orders import request_checkpoint

    stream = settings.stream_named(name, _NO_COPY)
    changed = set_paused(settings, stream, paused=False)
    if changed:
        note_action(settings, "resume", stream.label)
        request_checkpoint(settings, stream.name)
    echo(f"{stream.label}: {'resumed; the next run copies' if changed else 'not paused'}")
    if stream.paused:
        echo(f"{stream.label}: stays paused: `paused` of the configuration is true")
