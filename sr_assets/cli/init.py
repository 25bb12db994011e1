"""The command `init`: a first configuration, tested, with the stream of its advisories."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_error, print_warning
from sr_assets.cli.base import FILE, cli, echo
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError
from sr_assets.domain.foreign_text import visible

if TYPE_CHECKING:
    from sr_assets.adapters.nats.administration import Cluster
    from sr_assets.settings import Settings, StreamSettings

#: Fields that name the sender in the payloads of usual agents, the most specific first.
_SENDER_FIELDS: Final = (
    "sender", "identity", "certname", "fqdn", "hostname", "node", "host", "device_id", "device", "id", "name",
)  # fmt: skip
#: The stream of advisories in `conf/three-tiers`, and the age of its oldest message: that of the history.
_ADVISORIES: Final = "CHORIA_ADVISORIES"
_KEPT_DAYS: Final = 90
_HEARTBEATS: Final = "sr_assets.observer_alive.>"
_SOURCE: Final = "nats://localhost:4222"
_TEMPLATE: Final = """\
# Written by `sr-assets init` on {date}. `sr-assets check` tests this file; docs/configuration.md describes all keys.
# The environment replaces ${{NAME}} in a value, so that this file need not contain passwords.

# The replicator, in every header and advisory, and the default site of the entries. No other replicator has its name.
name: {name}

# The home, on a local disk: positions, tables, history and the Dagster instance. Default: ./.sr_assets
# state_store: /var/lib/sr-assets

{tls}streams:
  - stream: {stream}
    source_url: {source}
    target_url: {target}
    # The stream of the copies, created if it is missing. Give each site its own if several copy to one cluster.
    target_stream: {target_stream}
    # target_subject_prefix: london
{sampling}"""
_SAMPLING: Final = """
    # Copy one message per node and interval, and skip all others. Without these keys, every message is copied.
    inspect_field: {sender}
    inspect_duration: 1h    # the sampling interval; longer silence retires a node
    warn_duration: 15m      # longer silence is a timeout
    # size_trigger: 1KiB    # copy earlier if the size changes by this much

    # Announce each node that is new, silent, back or retired, on the source's cluster.
    advisory:
      subject: choria.stream.advisories.%s.%v   # %s is the event, %v the node
      reliable: true                            # retry until JetStream acknowledges it
"""


@cli.command(epilog="Example: sr-assets init --from stream-replicator.yaml")
@click.option("--from", "old", type=FILE, help="Take over this file of the Stream Replicator, old or new.")
@click.option("--name", help="Name of this replicator, which no other replicator of a centre has.")
@click.option("--source", metavar="URL", help=f"The source's server (suggested: {_SOURCE}).")
@click.option("--stream", metavar="NAME", help="The source's stream.")
@click.option("--sender", metavar="FIELD", help="The JSON field that names the sender; - copies every message.")
@click.option("--target", metavar="URL", help="The target's server.")
@click.option("--ca", type=FILE, help="The CA of the servers, for TLS.")
@click.option("--cert", type=FILE, help="Our certificate, for TLS.")
@click.option("--key", type=FILE, help="Our private key, for TLS.")
@click.option("--yes", is_flag=True, help="Accept every suggestion without a question.")
def init(
    old: Path | None, *, yes: bool, ca: Path | None, cert: Path | None, key: Path | None, **chosen: str | None
) -> int:
    """Write a first configuration, test its links, and create the stream of its advisories.

    The file is the one of --config (default: conf/replication.yaml), and must not exist. Questions concern what no option
    gives, and the creation of the stream. If a server cannot be reached, the question for its URL is repeated; --yes
    ends there, or writes a target all the same. Ctrl-C at a question leaves no file.

    Exit code 1: a link or a permission is missing; correct the file, then run `check --connect`.
    """
    from sr_assets.cli.streams import check_connectivity
    from sr_assets.cli.warnings import warn
    from sr_assets.settings import load_settings
    from sr_assets.settings.loading import configured_path

    file = configured_path(None, os.environ)
    if file.exists():
        raise ConfigurationError(f"{file}: already exists; name a new file with --config, or run `sr-assets check`")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("init asks questions; run it on a terminal, or pass --yes with --source and --target")
    tls = {name: str(path) for name, path in (("ca", ca), ("cert", cert), ("key", key)) if path is not None}
    questions: list[str] = []
    if old is None:
        text = _ask(_Answers(chosen, yes), tls)
    elif tls or any(chosen[option] for option in chosen if option != "name"):
        raise click.UsageError("--from takes everything but --name from the file; omit the other options")
    else:
        text, questions = _converted(old, chosen["name"])
    _write(file, text)
    for question in questions:
        print_warning(f"{file}: {question}")
    if questions:
        raise ConfigurationError(f"{file}: has open questions; answer them, then run `sr-assets check --connect`")
    try:
        settings = load_settings(file)
    except ConfigurationError as error:
        file.unlink()
        raise ConfigurationError(f"{error}; nothing was written") from None
    try:
        warn(settings)
        _offer_advisory_streams(settings, yes=yes)
    except (KeyboardInterrupt, click.Abort):
        file.unlink()
        raise
    echo(f"wrote {file}")
    if failed := check_connectivity(settings, "table"):
        echo(f"correct {file}, then run `sr-assets check --connect`")
    else:
        _print_next(settings, file, takes_over=old is not None)
    return failed


def _write(file: Path, text: str) -> None:
    from sr_assets.cli.importing import write_new

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{file.parent}: cannot be created: {error.strerror}") from None
    write_new(file, text)


def _converted(old: Path, name: str | None) -> tuple[str, list[str]]:
    """Return a file of the Stream Replicator as our configuration, and the questions that the operator must answer."""
    from sr_assets.cli.importing import convert
    from sr_assets.settings import load_settings
    from sr_assets.settings.document import read_tree

    if "topics" in {str(key).lower() for key in read_tree(old)}:
        return convert(old, name, connect=True)
    if name is not None:
        raise click.UsageError(f"--name: {old} has its own; change it there")
    # Unknown and refused keys end here, with the remedy.
    load_settings(old)
    heading = f"# Taken from {old} by `sr-assets init --from` on {times.utc_now():%Y-%m-%d}, unchanged.\n"
    return heading + old.read_text(encoding="utf-8"), []


class _Answers(NamedTuple):
    """The options of the command, and the answers in their place."""

    options: dict[str, str | None]
    yes: bool

    def text(
        self, option: str, question: str, suggested: str | None = None, check: Callable[[str], object] = str
    ) -> str:
        """Return an option, or the answer to a question, which is repeated while `check` raises an error.

        A RunError of `check` about an option leads to the question too. With --yes, return the suggestion. Raises
        UsageError for a wrong option, and if there is no suggestion.
        """

        def checked(value: str) -> str:
            try:
                check(value)
            except ConfigurationError as error:
                raise click.UsageError(visible(str(error))) from None
            except ValueError as error:
                raise click.UsageError(f"--{option}: {error}") from None
            return value

        def answered(value: str) -> str:
            try:
                return checked(value)
            except RunError as error:
                raise click.UsageError(visible(str(error))) from None

        if given := self.options[option]:
            try:
                return checked(given)
            except RunError as error:
                print_error(str(error))
        if not self.yes:
            return str(click.prompt(question, default=suggested, value_proc=answered))
        if suggested is None:
            raise click.UsageError(f"--yes needs --{option}: there is nothing to suggest")
        return suggested

    def url(
        self,
        option: str,
        question: str,
        tls: dict[str, str],
        suggested: str | None = None,
        use: Callable[[Cluster], object] = lambda _: None,
    ) -> str:
        """Return a server's URL as `text` does; without --yes, of a server that answers when `use` asks it."""
        from sr_assets.adapters.nats.administration import Cluster
        from sr_assets.settings import load_cluster

        def reach(url: str) -> None:
            server = load_cluster(url, tls, named=f"--{option}")
            if not self.yes:
                with Cluster(server, "sr-assets init") as cluster:
                    use(cluster)

        return self.text(option, question, suggested, reach)


def _ask(answers: _Answers, tls: dict[str, str]) -> str:
    """Return the configuration from options, answers and the source's streams."""
    from sr_assets.adapters.nats.administration import Cluster
    from sr_assets.settings import load_cluster
    from sr_assets.settings.names import read_site_name

    host = re.sub(r"[^A-Z0-9_-]", "_", socket.gethostname().partition(".")[0].upper())
    values = {"name": answers.text("name", "Name of this replicator, such as the city", host or None, read_site_name)}
    values["source"] = answers.url("source", "URL of the source's server", tls, _SOURCE, partial(_streams, answers))
    with Cluster(load_cluster(values["source"], tls, named="--source"), "sr-assets init") as source:
        values["stream"] = values["target_stream"] = _stream(answers, source)
        sender = _sender(answers, source, values["stream"])
    values["target"] = answers.url("target", "URL of the target's server", tls)
    quoted = {key: _yaml(value) for key, value in values.items()}
    return _TEMPLATE.format(
        **quoted,
        date=f"{times.utc_now():%Y-%m-%d}",
        tls="".join(["tls:\n", *(f"  {key}: {_yaml(value)}\n" for key, value in tls.items()), "\n"]) if tls else "",
        sampling=_SAMPLING.format(sender=_yaml(sender)) if sender else "",
    )


def _yaml(value: str) -> str:
    import yaml

    return str(yaml.safe_dump(value, width=10**6, allow_unicode=True).splitlines()[0])


def _streams(answers: _Answers, source: Cluster) -> dict[str, dict[str, Any]]:
    """Return the infos of the streams that can be copied, by name; none if an option names the stream."""
    if answers.options["stream"]:
        return {}
    infos = {info["config"]["name"]: info for info in source.list_streams()}
    names = sorted(name for name in infos if not name.startswith(("KV_", "OBJ_", "$")) and name != _ADVISORIES)
    if not names:
        raise ConfigurationError(
            f"{source.settings.label}: has no stream; create the stream into which the nodes publish, or correct --source"
        )
    return {name: infos[name] for name in names}


def _stream(answers: _Answers, source: Cluster) -> str:
    """Return the stream to copy: the option, the only one of the source, or the answer."""
    if given := answers.options["stream"]:
        source.stream_info(given)
        return given
    infos = _streams(answers, source)
    names = list(infos)
    echo(f"streams of {source.settings.label}:")
    for name in names:
        subjects = ", ".join(infos[name]["config"].get("subjects") or ())
        echo(f"  {name}: {infos[name]['state']['messages']} messages of {subjects}")
    if len(names) > 1 and answers.yes:
        raise click.UsageError(f"the source has several streams; choose one with --stream: {', '.join(names)}")
    return names[0] if len(names) == 1 else str(click.prompt("Stream to copy", type=click.Choice(names)))


def _sender(answers: _Answers, source: Cluster, stream: str) -> str | None:
    """Return the field that names the sender, or None to copy every message."""
    fields = _text_fields(source, stream)
    echo(
        f"text fields of the newest message of {stream}:"
        if fields
        else f"the newest message of {stream} has no text field"
    )
    for name, value in fields.items():
        echo(f"  {name}: {value[:60]}")
    suggested = next((name for name in _SENDER_FIELDS if name in fields), None)
    if suggested is None and answers.yes and not answers.options["sender"]:
        raise click.UsageError(
            f"the newest message of {stream} names no sender in a field that we know; name the field with --sender, or copy"
            " every message with --sender -"
        )
    answer = answers.text("sender", "Field that names the sender (- copies every message)", suggested or "-")
    return None if answer == "-" else answer


def _text_fields(source: Cluster, stream: str) -> dict[str, str]:
    """Return the plain text fields of a stream's newest message, if it is a JSON object."""
    import orjson

    newest = source.last_message(stream)
    try:
        document = orjson.loads(newest.payload) if newest else None
    except orjson.JSONDecodeError:
        document = None
    items = document.items() if isinstance(document, dict) else ()
    return {key: value for key, value in items if isinstance(value, str) and re.fullmatch(r"[\w-]{1,60}", key)}


def _offer_advisory_streams(settings: Settings, *, yes: bool) -> None:
    """Create, after a question, the stream that takes the advisories, on each cluster where no stream takes them."""
    from sr_assets.adapters.nats.administration import Cluster

    announcing = defaultdict(list)
    for stream in settings.streams:
        if stream.advisory is not None and stream.advisory.reliable is not False:
            announcing[stream.target if stream.advisory.cluster == "target" else stream.source].append(stream)
    for where, streams in announcing.items():
        try:
            with Cluster(where, "sr-assets init") as cluster:
                _offer_advisory_stream(cluster, streams, yes=yes)
        except SrAssetsError as error:
            print_warning(f"{where.label}: the stream of the advisories was not created: {error}")


def _offer_advisory_stream(cluster: Cluster, streams: list[StreamSettings], *, yes: bool) -> None:
    from sr_assets.domain.positions import DAY_NS
    from sr_assets.domain.subjects import advisory_pattern, covers

    subjects: dict[str, None] = {}
    for stream in streams:
        assert stream.advisory is not None
        observer = stream.advisory.observer_subject
        subjects[advisory_pattern(stream.advisory.subject)] = None
        subjects[_HEARTBEATS if covers(_HEARTBEATS, observer) else observer] = None
    missing = [subject for subject in subjects if not cluster.stream_names(subject)]
    if not missing:
        return
    if cluster.stream_exists(_ADVISORIES):
        print_warning(f"{cluster.settings.label}: stream {_ADVISORIES} does not take {', '.join(missing)}; add them")
        return
    offer = (
        f"Create stream {_ADVISORIES} on {cluster.settings.label} for {', '.join(missing)}, kept for {_KEPT_DAYS} days?"
    )
    if yes or click.confirm(offer, default=True):
        replicas = cluster.stream_info(streams[0].stream).replicas if streams[0].source == cluster.settings else 1
        created = cluster.create_stream(
            {
                "name": _ADVISORIES,
                "subjects": missing,
                "max_age": _KEPT_DAYS * DAY_NS,
                "num_replicas": replicas,
                "allow_direct": True,
            }
        )
        echo(f"created stream {created.stream} on {cluster.settings.label} for {', '.join(missing)}")


def _print_next(settings: Settings, file: Path, *, takes_over: bool) -> None:
    from sr_assets.settings import DEFAULT_CONFIG

    command = "sr-assets" if file == DEFAULT_CONFIG else f"sr-assets --config {file}"
    first = (
        {f"recover --stream {stream.label}": "take over its position" for stream in settings.streams}
        if takes_over
        else {"check": "print the planned work"}
    )
    steps = first | {"run --once": "copy, track and publish once", "up": "serve the UI on port 3000 and keep running"}
    echo("next, after the Stream Replicator is stopped:" if takes_over else "next:")
    width = max(map(len, steps))
    for step, effect in steps.items():
        echo(f"  {command} {step:{width}}  {effect}")
