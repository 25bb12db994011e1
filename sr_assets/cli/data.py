"""The commands `data get`, `put`, `delete`, `watch` and `list`."""

import contextlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import cli, echo, form_option, note_action
from sr_assets.cli.render import Format, show
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError, TransientError
from sr_assets.domain.secrets import MASK, as_text, masked

if TYPE_CHECKING:
    from sr_assets.adapters.data import Change, Source

_yes_option = click.option("--yes", is_flag=True, help="Do not ask; required without a terminal.")
_reveal_option = click.option("--reveal", is_flag=True, help="Show values that look like secrets.")


@cli.group()
def data() -> None:
    """Read and change the values of the sources in the block `data`."""


@data.command("get", epilog="Example: sr-assets data get ops/cadence --history")
@click.argument("label", metavar="SOURCE/KEY")
@click.option("--history", is_flag=True, help="List the revisions that the bucket keeps, oldest first.")
@_reveal_option
@form_option
def get(label: str, history: bool, reveal: bool, form: Format) -> None:
    """Print a value."""
    source, key, secret = _opened(label)
    with _naming(label), source:
        if not history:
            for line in _shown(label, source.get(key), secret, reveal=reveal).split("\n"):
                echo(line)
            return
        _show(label, source.history(key), form, secret, reveal=reveal)


@data.command("list", epilog="Example: sr-assets data list ops")
@click.argument("label", metavar="SOURCE[/PREFIX]")
@_reveal_option
@form_option
def list_keys(label: str, reveal: bool, form: Format) -> None:
    """List the keys of a source with their values."""
    from sr_assets.adapters.data import source_named
    from sr_assets.settings import load_sources
    from sr_assets.settings.references import MissingValueError

    name, _, prefix = label.partition("/")
    rows, sources = [], load_sources()
    with _naming(label), source_named(sources.data, name) as source:
        for key in source.keys(prefix):
            each = f"{name}/{key}"
            try:
                rows.append((each, _shown(each, source.get(key), each in sources.secrets, reveal=reveal)))
            except MissingValueError:  # deleted since it was listed
                continue
    show(("key", "value"), rows, form)


@data.command("watch", epilog="Example: sr-assets data watch ops/cadence")
@click.argument("label", metavar="SOURCE/KEY")
@_reveal_option
def watch(label: str, reveal: bool) -> None:
    """Print a value and each change of it, until Ctrl-C."""
    source, key, secret = _opened(label)
    with _naming(label), source:
        for change in source.watch(key):
            text = "deleted" if change.deleted else _shown(label, change.value, secret, reveal=reveal)
            echo(f"{_time(change).isoformat(timespec='milliseconds')} {label} {text}")
            sys.stdout.flush()


@data.command("put", epilog="Example: sr-assets data put ops/cadence 2m --yes")
@click.argument("label", metavar="SOURCE/KEY")
@click.argument("value")
@_yes_option
def put(label: str, value: str, yes: bool) -> None:
    """Write a value."""
    source, key, secret = _opened(label)
    _refuse_memory(source, label)
    if value != value.encode(errors="replace").decode():
        raise click.UsageError(f"{label}: the value is not UTF-8 text")
    with _naming(label), source:
        present, new = source.get(key, None), _shown(label, value, secret)
        before = None if present is None else _shown(label, present, secret)
        _confirm(f"{label}: write {new!r}?" if before is None else f"{label}: replace {before!r} by {new!r}?", yes=yes)
        source.put(key, value)
    _note("data put", label, new if before is None else f"{before} -> {new}")
    echo(f"{label}: {new}")


@data.command("delete", epilog="Example: sr-assets data delete ops/cadence --yes")
@click.argument("label", metavar="SOURCE/KEY")
@_yes_option
def delete(label: str, yes: bool) -> None:
    """Delete a key."""
    source, key, secret = _opened(label)
    _refuse_memory(source, label)
    with _naming(label), source:
        before = _shown(label, source.get(key), secret)
        _confirm(f"{label}: delete {before!r}?", yes=yes)
        source.delete(key)
    _note("data delete", label, before)
    echo(f"{label}: deleted")


def _opened(label: str) -> "tuple[Source, str, bool]":
    """Return the source and the key of `SOURCE/KEY`, and whether it fills a secret key.

    Raises ConfigurationError for a malformed or unknown one.
    """
    from sr_assets.adapters.data import source_named
    from sr_assets.settings import load_sources
    from sr_assets.settings.data import split_label

    try:
        name, key = split_label(label)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    sources = load_sources()
    return source_named(sources.data, name), key, label in sources.secrets


@contextlib.contextmanager
def _naming(label: str) -> Iterator[None]:
    """Name `source/key` in the errors of its source, and the remedy of an outage."""
    try:
        yield
    except TransientError as error:
        raise TransientError(f"{label}: {error}; start or repair the source") from None
    except RunError as error:
        raise type(error)(f"{label}: {error}") from None


def _note(action: str, label: str, detail: str) -> None:
    """Record an action, also if the configuration cannot be loaded: the action may be its repair."""
    from sr_assets.adapters.published.actions import record_action
    from sr_assets.settings import load_settings, load_sources

    try:
        note_action(load_settings(), action, label, detail)
    except SrAssetsError:
        record_action(load_sources().home, action, label, detail)


def _refuse_memory(source: "Source", label: str) -> None:
    if source.settings.type == "memory":
        raise ConfigurationError(
            f"{label}: a memory source ends with its process; set data.{source.name}.values instead"
        )


def _confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; without one, require `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question.partition('?')[0]}: needs --yes without a terminal")
    click.confirm(question, abort=True, err=True)


def _shown(label: str, value: object, secret: bool, *, reveal: bool = False) -> str:
    """Return a value as text; a secret is masked unless `reveal`."""
    if reveal:
        return as_text(value)
    return MASK if secret else masked(label, value)


def _time(change: "Change") -> datetime:
    return datetime.fromtimestamp(change.at_ns / 1e9, UTC)


def _show(label: str, changes: "list[Change]", form: Format, secret: bool, *, reveal: bool) -> None:
    rows = [
        (change.revision, _time(change), "delete", None)
        if change.deleted
        else (change.revision, _time(change), "put", _shown(label, change.value, secret, reveal=reveal))
        for change in changes
    ]
    show(("revision", "at", "operation", "value"), rows, form)
