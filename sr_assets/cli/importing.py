"""The command `import`: conversion of an old replicator's file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.cli.base import FILE, cli, echo, echo_document
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError

if TYPE_CHECKING:
    from sr_assets.settings.legacy import Imported


@cli.command("import", epilog="Example: sr-assets import stream-replicator.yaml")
@click.argument("file", type=FILE)
@click.option(
    "-o",
    "output",
    type=FILE,
    help="Write to this new file (default: print).",
)
@click.option("--name", help="Name of this replicator, which no other replicator of a centre has.")
@click.option("--connect", is_flag=True, help="Query the servers for the streams that take the topics' subjects.")
def import_file(file: Path, output: Path | None, name: str | None, connect: bool) -> None:
    """Convert FILE, an old replicator's configuration with `topics:`.

    Open questions go to stderr and into the file. An unknown stream becomes a placeholder, which `check` refuses.
    """
    text, questions = convert(file, name, connect=connect)
    if output is None:
        echo_document(text)
    else:
        write_new(output, text)
    for question in questions:
        echo(f"open: {question}", err=True)


def convert(file: Path, name: str | None, *, connect: bool) -> tuple[str, list[str]]:
    """Return an old replicator's file as our configuration with comments, and the open questions, one line each.

    `connect` queries the servers for the streams. Raises ConfigurationError for another file.
    """
    import yaml

    from sr_assets.settings.document import read_tree
    from sr_assets.settings.legacy import import_topics

    try:
        made = import_topics(read_tree(file), name)
    except ConfigurationError as error:
        text = str(error)
        raise ConfigurationError(text if text.startswith(str(file)) else f"{file}: {text}") from None
    if connect:
        _name_streams(made)
    lines = [f"Converted from {file.name} by `sr-assets import`.", "", "Conversion of its keys:", *made.notes]
    lines += ["", "Open questions:", *made.questions] if made.questions else []
    comment = "".join(f"# {' '.join(line.split())}".rstrip() + "\n" for line in lines)
    text = f"{comment}\n{yaml.safe_dump(made.document, sort_keys=False, allow_unicode=True, width=120)}"
    return text, [" ".join(question.split()) for question in made.questions]


def write_new(file: Path, text: str) -> None:
    """Write a new file that only its owner can read, because its URLs may contain passwords."""
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise ConfigurationError(f"{file}: already exists; choose a new file with -o") from None
    except OSError as error:
        raise RunError(f"{file}: cannot be written: {error.strerror}") from None


def _name_streams(made: "Imported") -> None:
    """Replace each placeholder, and the target's stream, if exactly one stream takes the topic's subject."""
    for entry in made.document["streams"]:
        subject, name = entry["filter_subject"], entry["name"]
        takers = {}
        for end in ("source", "target"):
            try:
                takers[end] = _takers(entry, end, made.document.get("tls") or {}, subject)
            except SrAssetsError as error:
                made.questions.append(
                    f"{name}: the {end} could not be queried for the stream that takes {subject}: {error}"
                )
        if len(source := takers.get("source", [])) == 1:
            made.questions = [question for question in made.questions if repr(entry["stream"]) not in question]
            entry["stream"] = source[0]
        elif source:
            made.questions.append(f"{name}: several streams of the source take {subject}: {', '.join(source)}")
        if len(target := takers.get("target", [])) == 1:
            entry["target_stream"] = target[0]


def _takers(entry: dict[str, Any], end: str, tls: dict[str, Any], subject: str) -> list[str]:
    from sr_assets.adapters.nats.administration import Cluster
    from sr_assets.settings import load_cluster

    block = {} if entry.get(f"disable_{end}_tls") else entry.get("tls", tls)
    url = f"{end}_url"
    with Cluster(load_cluster(entry[url], block, named=url), "sr-assets import") as cluster:
        return cluster.stream_names(subject)
