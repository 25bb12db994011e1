"""Commands `measure` and `compare`: suites of measurements, and their results side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import FILE, SECONDS, cli, form_option
from sr_assets.cli.render import Format, show

if TYPE_CHECKING:
    from sr_assets.domain.clusters import ClusterSettings

_RESULTS = click.Path(path_type=Path, file_okay=False)


class _Numbers(click.ParamType["tuple[int, ...]"]):
    """Numbers of nodes, separated by commas."""

    name = "N[,N…]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> "tuple[int, ...]":
        """Return the numbers."""
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of numbers; use one such as 100,1000", param, ctx)
        return tuple(map(int, parts))


@cli.command()
@click.argument("suite", type=click.Choice(["rpc"]))
@click.option("--nodes", type=_Numbers(), required=True, help="Numbers of nodes; one test each.")
@click.option("--out", type=_RESULTS, required=True, help="New directory of the result files.")
@click.option("--interval", type=SECONDS, default="1s", show_default=True, help="Time between two requests.")
@click.option("--for", "for_seconds", type=SECONDS, default="10s", show_default=True, help="Duration of each test.")
@click.option(
    "--bytes", "payload_bytes", type=click.IntRange(0), default=100, show_default=True, help="Size of a reply."
)
@click.option("--url", help="The server (default: the source of the first configured stream).")
@click.option("--ca", metavar="FILE", help="CA of the server's certificate, with --url.")
@click.option("--cert", metavar="FILE", help="Client certificate, with --url.")
@click.option("--key", metavar="FILE", help="Key of the client certificate, with --url.")
def measure(
    suite: str,
    nodes: tuple[int, ...],
    out: Path,
    interval: float,
    for_seconds: float,
    payload_bytes: int,
    url: str | None,
    **tls: str | None,
) -> None:
    """Measure a fleet, write the result files and a report.

    `rpc`: from a request to all replies, of a fleet such as `emulate --rpc`.

    Exit code 1 without a result unless exactly the expected items were found.
    """
    from sr_assets.adapters.extras import require_extra
    from sr_assets.measure.report import render_report
    from sr_assets.measure.results import ResultFolder
    from sr_assets.measure.rpc import measure_rpc

    require_extra("the report of measure", "charts", "matplotlib")
    cluster = _cluster(url, tls)
    about = {"suite": suite, "nodes": list(nodes), "interval_seconds": interval, "for_seconds": for_seconds}
    about |= {"payload_bytes": payload_bytes, "servers": cluster.label}
    with ResultFolder(out, about) as results:
        measure_rpc(
            cluster,
            nodes,
            interval_seconds=interval,
            for_seconds=for_seconds,
            payload_bytes=payload_bytes,
            tests=results.tests,
        )
        results.complete(lambda: render_report([(suite, about, results.tests)]))
    for test in results.tests:
        p50, p95, most = test.percentiles_ms()
        click.echo(
            f"{test.nodes} nodes: {test.found} of {test.expected}, p50 {p50:.1f} ms, p95 {p95:.1f} ms, max {most:.1f} ms"
        )


@cli.command()
@click.argument("first", type=_RESULTS)
@click.argument("second", type=_RESULTS)
@click.option("-o", "file", type=FILE, help="Write a report with both, side by side.")
@form_option
def compare(first: Path, second: Path, file: Path | None, form: Format) -> None:
    """Compare two result directories of `measure`, test by test."""
    from sr_assets.adapters.extras import require_extra
    from sr_assets.domain.errors import RunError, cannot_write
    from sr_assets.measure.report import render_report
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
