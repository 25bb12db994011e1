"""Command `replay`: the transitions and copies of a retained stream under other durations, or their verification."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.cli.base import SECONDS, TIME, cli, configured, form_option, stream_option
from sr_assets.cli.render import Format, print_document, print_note, show
from sr_assets.domain.durations import duration
from sr_assets.operate.bars import progress_bars

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets.stages.replay import Replay

_DIFFERENCE = ("node", "event", "event_time", "sequence", "only_in", "reason")


@cli.command(epilog="Example: sr-assets replay --stream NODES --warn-duration 30m")
@stream_option
@click.option("--since", type=TIME, metavar="T", help="Begin at this time (default: the earliest possible one).")
@click.option("--until", type=TIME, metavar="T", help="End before this time (default: the end of the record).")
@click.option("--warn-duration", type=SECONDS, metavar="D", help="Silence for longer than this is a timeout.")
@click.option("--inspect-duration", type=SECONDS, metavar="D", help="Sampling interval; longer silence retires a node.")
@click.option("--verify", is_flag=True, help="Compare with the record; exit with 1 if there is a difference.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write transitions.parquet and availability.parquet into this directory.",
)
@form_option
@configured
@progress_bars()
def replay(
    settings: "Settings",
    name: str,
    since: int | None,
    until: int | None,
    warn_duration: float | None,
    inspect_duration: float | None,
    verify: bool,
    out: Path | None,
    form: Format,
) -> int:
    """Replay the messages that a source holds, by the rules of its stream.

    With other durations, the result shows how many advisories they would make. Nothing is written to a stream or a state.

    Exit code 1 with --verify: the record differs, for no reason that `replay` recognises.
    """
    from sr_assets.adapters.spark.run_session import HomeEngine
    from sr_assets.stages.replay import FEED_REFUSED, Wanted
    from sr_assets.stages.replay import replay as replay_stream

    stream = settings.stream_named(name, FEED_REFUSED)
    warn_ns, inspect_ns = (None if each is None else round(each * 1e9) for each in (warn_duration, inspect_duration))
    wanted = Wanted(since, until, warn_ns, inspect_ns, verify=verify, out=out)
    result = replay_stream(settings, stream, wanted, HomeEngine(settings.spark, settings.home.resolve()))
    if form == "json":
        print_document(result.document)
    elif form == "csv":
        _print_csv(result)
    else:
        _print_tables(result, form)
    return int(None in result.counted)


def _print_csv(result: "Replay") -> None:
    if result.differences is None:
        show(("kind", "replayed", "recorded"), result.both_sides, "csv")
    else:
        show(_DIFFERENCE, _listed([*result.differences, *result.explained]), "csv")


def _print_tables(result: "Replay", form: Format) -> None:
    totals, document = result.totals, result.document
    title = f"{result.name}/{result.stream} from {document['since']:%Y-%m-%d %H:%M:%S} to {document['until']:%Y-%m-%d %H:%M:%S}"
    policy = f"silent after {duration(result.warn_ns / 1e9)}, retired after {duration(result.inspect_ns / 1e9)}"
    show(("kind", "replayed", "recorded"), result.both_sides, form, title=f"{title} UTC, {policy}")
    print_note(f"{totals['messages']} messages of {totals['nodes']} nodes; silent: at the end")
    days = [(day.date, day.advisories, day.recorded) for day in result.days]
    show(("date", "advisories", "recorded"), days, form, title="advisories by day, before the rules of operators")
    if result.differences is None:
        return
    for title, listed in (("differences", result.differences), ("differences for a known reason", result.explained)):
        if listed:
            show(_DIFFERENCE, _listed(listed), form, title=title, first=("node", "event", "event_time", "only_in"))
    reasons = [f"{count} {reason or 'without a reason'}" for reason, count in result.counted.items()]
    print_note(f"differences: {', '.join(reasons)}" if reasons else "the replay equals the record")


def _listed(differences: "list[dict[str, Any]]") -> "list[tuple[Any, ...]]":
    return [tuple(row[name] for name in _DIFFERENCE) for row in differences]
