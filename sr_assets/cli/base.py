"""What every command shares: the group, exit codes, settings, formats, durations.

Exit codes: 0, 1 (a run, a server or a lookup failed), 2 (configuration or usage), 130 (interrupted). An error is one
line. Not here: the commands.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.domain.errors import ConfigurationError, SrAssetsError

if TYPE_CHECKING:
    from sr_assets.adapters.published.reading import Rows
    from sr_assets.settings import Settings

_INTERRUPTED = 130


class _Seconds(click.ParamType[float]):
    """A duration as in the configuration, or plain seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        from sr_assets.settings import parse_duration

        if isinstance(value, float):
            return value
        try:
            return float(value) if str(value).replace(".", "", 1).isdecimal() else parse_duration(value) / 1e9
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


SECONDS = _Seconds()
form_option = click.option(
    "--format",
    "form",
    type=click.Choice(("table", "json", "csv")),
    default="table",
    show_default=True,
    help="How rows are shown.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit."""
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; whatever goes wrong is one line on stderr."""
    try:
        return int(cli.main(arguments, prog_name="sr-assets", standalone_mode=False) or 0)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except ConfigurationError as error:
        return fail(str(error), 2)
    except SrAssetsError as error:
        return fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has enough; closing stdout at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def fail(message: str, code: int) -> int:
    """Say what went wrong in one line on stderr; returns the exit code."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the settings to a command, which are read when it is called."""

    @wraps(command)
    def with_settings(*arguments: Any, **options: Any) -> Any:
        return command(_settings(), *arguments, **options)

    return with_settings


def _settings() -> "Settings":
    from sr_assets.settings import load_settings

    return load_settings()


def print_rows(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    form: Any,
    title: str | None = None,
    *,
    alarmed: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> None:
    """Print rows in the form that was asked for; people see those in red that are `alarmed`."""
    from sr_assets.cli import render

    render.show(columns, rows, form, title=title, alarmed=alarmed)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The configuration; default: SR_ASSETS_CONFIG, else conf/replication.yaml.",
)
@click.version_option(package_name="sr-assets", prog_name="sr-assets")
def cli(config: Path | None) -> None:
    """Replicate, sample and track fleets of machines that report over NATS JetStream."""
    if config is not None:
        os.environ["SR_ASSETS_CONFIG"] = str(config.absolute())


def warn(settings: "Settings") -> None:
    """Say what of the configuration has no effect, and which warning durations the fleet itself contradicts."""
    for warning in (*settings.warnings, *_short_warnings(settings)):
        click.echo(f"warning: {warning}", err=True)


def _short_warnings(settings: "Settings") -> list[str]:
    """Return the tracked streams where half of the nodes come back by themselves: in a tree the upstream sends that rarely."""
    from sr_assets.cli.render import duration

    query = """
        SELECT name || '/' || stream, median(age_seconds) FROM node_advisories
        WHERE event = 'recover' GROUP BY name, stream
        HAVING count(DISTINCT node) * 2 > (SELECT count(*) FROM node_availability AS all_nodes
            WHERE (all_nodes.name, all_nodes.stream) = (node_advisories.name, node_advisories.stream))
    """
    try:
        often = dict(ask(settings, query).values)
    except SrAssetsError:
        return []
    return [
        f"{stream.label}: most nodes time out and recover, after {duration(often[stream.label])}: warn_duration "
        f"({duration(stream.policy.warning_ns / 1e9)}) must exceed how often the source hears of them"
        for stream in settings.streams
        if stream.policy is not None and stream.label in often
    ]


def ask(settings: "Settings", sql: str, parameters: Mapping[str, Any] | None = None) -> "Rows":
    """Ask the published tables as a stranger may; raises RunError when nothing is published yet."""
    from sr_assets.adapters.published.reading import open_fleet, read_rows

    with open_fleet(settings.home, confined=True) as connection:
        return read_rows(connection, sql, parameters or ())
