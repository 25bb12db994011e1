"""Code that several commands share: the group, exit codes, settings, options for formats and durations.

Exit codes: 0, 1 (a run or a server failed), 2 (configuration or usage), 3 (nothing matches), 130 (interrupted).
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from sr_assets.adapters import times
from sr_assets.adapters.logs import configure_logging, escape_warnings, print_error
from sr_assets.cli.completing import complete_stream
from sr_assets.cli.render import FORMATS, Format
from sr_assets.domain.errors import ConfigurationError, NothingMatchesError, SrAssetsError
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.positions import DAY_NS
from sr_assets.operate.processes import INTERRUPTED, end_process

if TYPE_CHECKING:
    from sr_assets.settings import Settings

logger = logging.getLogger(__name__)

#: Exit code of a lookup that matches nothing.
NOTHING_MATCHES: Final = 3
#: The sections of `--help`, with their commands in order.
SECTIONS: Final = {
    "Run": "init up run check demo permissions topology spark enroll import login",
    "Watch": "lag summary report advisories availability status-page metrics",
    "Nodes": "nodes node retire unretire maintenance",
    "Streams": "pause resume recover retry-parked replay",
    "Sites and hosts": "members checkpoint restore step-down forget",
    "Tables and data": "query export schema data",
    "Measure": "measure compare emulate",
}
#: The path of a file, which need not exist.
FILE = click.Path(path_type=Path, dir_okay=False)
stream_option = click.option(
    "--stream",
    "name",
    required=True,
    metavar="NAME",
    shell_complete=complete_stream,
    help="The stream (or name/stream).",
)
ui_port_option = click.option(
    "--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Port of the UI."
)


class _Seconds(click.ParamType[float]):
    """A duration as in the configuration, or plain seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from sr_assets.settings import parse_duration

        if isinstance(value, float):
            return value
        plain = str(value).replace(".", "", 1).isdecimal()
        try:
            return parse_duration(f"{value}s" if plain else str(value)) / 1e9
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


class _Time(click.ParamType[int]):
    """A time as in the configuration."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return unix ns."""
        from sr_assets.settings.values import read_time

        if isinstance(value, int):
            return value
        try:
            return read_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Since(click.ParamType[int]):
    """A time as in the configuration, or a duration before now; a day or more begins at midnight UTC."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return unix ns."""
        from sr_assets.settings import parse_duration

        try:
            ago_ns = parse_duration(str(value))
        except ConfigurationError:
            return TIME.convert(value, param, ctx)
        at_ns = times.time_ns() - ago_ns
        # Days begin at midnight, so that repeated commands mean the same rows.
        return at_ns - at_ns % DAY_NS if ago_ns >= DAY_NS else at_ns


SECONDS, TIME, SINCE = _Seconds(), _Time(), _Since()


def form_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the output options; the command receives a `Format` as `form`."""
    return _forms(FORMATS)(command)


def table_or_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the output options without CSV, for output that is not a single table."""
    return _forms(("table", "json"))(command)


def _forms(forms: Sequence[Format]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        # `-o` of `compare` is its report.
        own = {name for option in getattr(command, "__click_params__", ()) for name in option.opts}
        names = ("--format", "form") if "-o" in own else ("-o", "--format", "form")

        @click.option(*names, type=click.Choice(forms), default="table", show_default=True, help="Output format.")
        @click.option("--wide", is_flag=True, help="Show every column, even if a row needs several lines.")
        @wraps(command)
        def with_form(*arguments: Any, form: Format, wide: bool, **options: Any) -> Any:
            return command(*arguments, form="wide" if wide and form == "table" else form, **options)

        return with_form

    return add


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process."""
    code = run_command(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        code = fail(f"the output cannot be written: {error.strerror}", 1)
    end_process(code)


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; every error is one line on stderr."""
    escape_warnings()
    try:
        return int(cli.main(arguments, prog_name="sr-assets", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        echo_document(error.format_message())
        return 0
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except ConfigurationError as error:
        return fail(str(error), 2)
    except NothingMatchesError as error:
        return fail(str(error), NOTHING_MATCHES)
    except SrAssetsError as error:
        return fail(str(error), 1)
    except click.Abort:
        echo("", err=True)  # the end of the question's line
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has ended. With stdout on /dev/null, closing it at exit raises no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def echo(line: str, *, err: bool = False) -> None:
    """Print one line, in which foreign text forges no other line and controls no terminal."""
    click.echo(visible(line), err=err)  # noqa: TID251  escaped


def echo_document(text: str) -> None:
    """Print a document of several lines as it is: a configuration, JSON, or metrics, whose form escapes foreign text."""
    click.echo(text, nl=bool(text) and not text.endswith("\n"))  # noqa: TID251  a document


def fail(message: str, code: int) -> int:
    """Print an error as one line on stderr and return the exit code."""
    print_error(message)
    return code


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Load the settings when the command is called, and pass them to it."""

    @wraps(command)
    def with_settings(*arguments: Any, **options: Any) -> Any:
        return command(_settings(), *arguments, **options)

    return with_settings


def _settings() -> "Settings":
    from sr_assets.settings import load_settings

    return load_settings()


def note_action(settings: "Settings", action: str, subject: str, detail: str = "") -> None:
    """Record a completed action of an operator in `operator_actions` and in the log file."""
    from sr_assets.adapters.published.actions import record_action

    row = record_action(settings.home, action, subject, detail)
    if settings.logfile is not None:
        configure_logging(settings)
        logger.info("%s: %s by %s on %s", subject, action, row["user"], row["host"], extra=row)


def _use_config(_: click.Context, __: click.Parameter, config: Path | None) -> None:
    if config is not None:
        os.environ["SR_ASSETS_CONFIG"] = str(config.absolute())


class _Commands(click.Group):
    """A group of commands, each with the option `--config`, like the group itself.

    Ctrl-C ends a command with one line on stderr instead of click's empty line.
    """

    group_class = type
    _config = click.Option(
        ["--config"],
        type=click.Path(path_type=Path),
        expose_value=False,
        callback=_use_config,
        help="Use this configuration file (default: SR_ASSETS_CONFIG, else conf/replication.yaml).",
    )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params.append(self._config)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        super().add_command(cmd, name)
        if self._config not in cmd.params:
            cmd.params.append(self._config)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section; those of a group inside have none."""
        if ctx.parent is not None:
            super().format_commands(ctx, formatter)
            return
        for section, names in SECTIONS.items():
            with formatter.section(section):
                rows = [(name, self.commands[name].get_short_help_str(limit=200)) for name in names.split()]
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            return fail("interrupted", INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="sr-assets", prog_name="sr-assets")
def cli() -> None:
    """Replicate, sample and track fleets of machines that report over NATS JetStream."""


def need_feeds(settings: "Settings", caller: str) -> None:
    """Raise ConfigurationError if no feed is configured, because there is no global view; `caller` names the command."""
    if not settings.feeds:
        raise ConfigurationError(f"{caller}: no feed is configured; add one to feeds")
