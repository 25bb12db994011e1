"""Commands `measure` and `compare`: suites of measurements, and their results side by side."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from sr_assets.cli.base import FILE, SECONDS, cli, echo, form_option
from sr_assets.cli.completing import complete_stream
from sr_assets.cli.render import Format, show
from sr_assets.operate.bars import progress_bars

if TYPE_CHECKING:
    from sr_assets.domain.clusters import ClusterSettings
    from sr_assets.measure.results import ResultFolder

_BACKLOG_SECONDS: Final = 3_600.0
#: Measures, and returns lines for the user.
_Work = Callable[["ResultFolder"], list[str]]
_RESULTS = click.Path(path_type=Path, file_okay=False)


class _Numbers(click.ParamType["tuple[int, ...]"]):
    """Numbers of nodes, separated by commas."""

    name = "N[,N…]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> "tuple[int, ...]":
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of numbers; use one such as 100,1000", param, ctx)
        return tuple(map(int, parts))


@cli.command(epilog="Example: sr-assets measure pipeline --nodes 1000 --out before")
@click.argument("suite", type=click.Choice(["pipeline", "silence", "catch-up", "rpc"]))
@click.option("--nodes", type=_Numbers(), required=True, help="Numbers of nodes; one set of tests each.")
@click.option("--out", type=_RESULTS, required=True, help="New directory of the result files.")
@click.option(
    "--interval",
    type=SECONDS,
    help="Time between two messages of a node (default: a third of warn_duration, at most 5 minutes); of `rpc`, between"
    " two requests (default: 1s).",
)
@click.option(
    "--for",
    "for_seconds",
    type=SECONDS,
    help="Duration of the load of each test (default: three intervals; of `rpc` 10s).",
)
@click.option(
    "--bytes",
    "payload_bytes",
    type=click.IntRange(0),
    help="Typical size of a message (7000), or size of a reply (100).",
)
@click.option(
    "--stream",
    "name",
    metavar="NAME",
    shell_complete=complete_stream,
    help="The stream (or name/stream) to measure (default: the first one).",
)
@click.option(
    "--subject",
    metavar="S",
    help="Subject of the emulated nodes; %s is the node (default: from the stream's subjects).",
)
@click.option(
    "--backlog", type=SECONDS, help="Hours of messages that `catch-up` drains, such as 2h (default: --for, else 1h)."
)
@click.option("--url", help="The server of `rpc` (default: the source of the first configured stream).")
@click.option("--ca", metavar="FILE", help="CA of the server's certificate, with --url.")
@click.option("--cert", metavar="FILE", help="Client certificate, with --url.")
@click.option("--key", metavar="FILE", help="Key of the client certificate, with --url.")
@progress_bars(still=True)
def measure(suite: str, nodes: tuple[int, ...], out: Path, **options: "str | float | None") -> None:
    """Measure a fleet, write the result files and a report.

    `pipeline`: from a message in the source to its copy, its node's advisory and its rows in the tables.
    `silence`: from a node's last message to its published timeout; every fifth node falls silent.
    `catch-up`: a run drains a backlog.
    `rpc`: from a request to all replies, of a fleet such as `emulate --rpc`.

    All except `rpc` use the configured servers, publish as new emulated nodes, and run the site's work unless a run is
    active. Use a site for measurements: the nodes stay in its tables.

    Exit code 1 without a result unless exactly the expected items were found.
    """
    from sr_assets.adapters.extras import require_extra
    from sr_assets.measure.html_report import render_report
    from sr_assets.measure.results import ResultFolder
    from sr_assets.operate.processes import signals_as_interrupt

    require_extra("the report of measure", "charts", "matplotlib")
    _refuse_options(suite, options)
    about, work = (_rpc if suite == "rpc" else _fleet)(suite, nodes, options)
    with ResultFolder(out, about) as results, signals_as_interrupt():
        lines = work(results)
        results.complete(lambda: render_report([(suite, about, results.tests)]))
    for test in results.tests:
        p50, p95, most = test.percentiles_ms()
        echo(
            f"{test.nodes} nodes: {test.found} of {test.expected}, p50 {p50:.1f} ms, p95 {p95:.1f} ms, max {most:.1f} ms"
            f" ({test.description})"
        )
    for line in lines:
        echo(line)


def _refuse_options(suite: str, options: "dict[str, Any]") -> None:
    """Raise UsageError for an option of another suite."""
    other = ("name", "subject", "backlog") if suite == "rpc" else ("url", "ca", "cert", "key")
    if suite in ("pipeline", "silence"):
        other = (*other, "backlog")
    for name in other:
        if options[name] is not None:
            raise click.UsageError(f"measure {suite} has no option --{'stream' if name == 'name' else name}")


def _rpc(suite: str, nodes: tuple[int, ...], options: "dict[str, Any]") -> "tuple[dict[str, Any], _Work]":
    """Return the facts about a measurement of requests, and its work."""
    from sr_assets.measure.rpc import measure_rpc

    cluster = _cluster(options["url"], {name: options[name] for name in ("ca", "cert", "key")})
    chosen: dict[str, Any] = {
        "interval_seconds": 1.0 if options["interval"] is None else options["interval"],
        "for_seconds": 10.0 if options["for_seconds"] is None else options["for_seconds"],
        "payload_bytes": 100 if options["payload_bytes"] is None else options["payload_bytes"],
    }

    def work(results: "ResultFolder") -> list[str]:
        measure_rpc(cluster, nodes, **chosen, tests=results.tests)
        return []

    return {"suite": suite, "nodes": list(nodes), **chosen, "servers": cluster.label}, work


def _fleet(suite: str, nodes: tuple[int, ...], options: "dict[str, Any]") -> "tuple[dict[str, Any], _Work]":
    """Return the facts about a measurement of a configured stream, and its work."""
    from sr_assets.measure.measured_stream import choose_entry, default_load, open_stream
    from sr_assets.measure.suites import measure_catch_up, measure_pipeline, measure_silence
    from sr_assets.settings import load_settings

    settings = load_settings()
    entry = choose_entry(settings, options["name"], announced=suite == "silence")
    for_seconds = options["for_seconds"]
    if suite == "catch-up":
        for_seconds = options["backlog"] or for_seconds or _BACKLOG_SECONDS
    load = default_load(entry, options["interval"], for_seconds, options["payload_bytes"], paced=suite != "catch-up")
    about = {"suite": suite, "nodes": list(nodes), "interval_seconds": load.interval_seconds}
    about |= {"for_seconds": load.for_seconds, "payload_bytes": load.payload_bytes}
    about |= {"stream": entry.label, "source": entry.source.label, "target": entry.target.label}

    def work(results: "ResultFolder") -> list[str]:
        stream = open_stream(settings, entry, options["subject"])
        suites = {"pipeline": measure_pipeline, "silence": measure_silence, "catch-up": measure_catch_up}
        return suites[suite](stream, nodes, load, results)

    return about, work


@cli.command(epilog="Example: sr-assets compare before after")
@click.argument("first", type=_RESULTS)
@click.argument("second", type=_RESULTS)
@form_option
@click.option("-o", "file", type=FILE, help="Write a report with both, side by side.")
def compare(first: Path, second: Path, file: Path | None, form: Format) -> None:
    """Compare two result directories of `measure`, test by test."""
    from sr_assets.adapters.extras import require_extra
    from sr_assets.domain.errors import RunError, cannot_write
    from sr_assets.measure.html_report import render_report
    from sr_assets.measure.results import read_results

    results = [(str(folder), *read_results(folder)) for folder in (first, second)]
    rows = []
    for number in range(max(len(tests) for _, _, tests in results)):
        tests = [side[number] if number < len(side) else None for _, _, side in results]
        about = next(test for test in tests if test)
        times = [test.percentiles_ms() if test else (None,) * 3 for test in tests]
        rows.append((number + 1, about.description, *(test and test.nodes for test in tests), *times[0], *times[1]))
    names = [f"{name}_{side}" for side in ("first", "second") for name in ("p50_ms", "p95_ms", "max_ms")]
    show(["test", "description", "nodes_first", "nodes_second", *names], rows, form)
    if file is not None:
        require_extra("the report of compare", "charts", "matplotlib")
        try:
            file.write_text(render_report(results), encoding="utf-8")
        except OSError as error:
            raise RunError(cannot_write(file, error)) from None


def _cluster(url: str | None, tls: dict[str, str | None]) -> "ClusterSettings":
    """Return the server of `--url`, else the source of the first configured stream."""
    from sr_assets.domain.errors import ConfigurationError
    from sr_assets.settings import load_cluster, load_settings

    if url is not None:
        return load_cluster(url, tls)
    settings = load_settings()
    if not settings.entries:
        raise ConfigurationError("measure: no stream is configured; add one, or name a server by --url")
    return settings.entries[0].source
