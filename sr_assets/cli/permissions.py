"""The command `permissions`: the least permissions of each connection's user, printed or checked."""

import json
from typing import TYPE_CHECKING

import click

from sr_assets.adapters.logs import print_error, print_warning
from sr_assets.cli.base import cli, configured, echo, echo_document
from sr_assets.cli.completing import complete_stream

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets.stages.connection_users import User


@cli.command(epilog="Example: sr-assets permissions --check")
@click.option(
    "--stream",
    "name",
    metavar="NAME",
    shell_complete=complete_stream,
    help="Only the permissions for this stream (or name/stream).",
)
@click.option(
    "-o",
    "--format",
    "form",
    type=click.Choice(("nats", "json", "nsc")),
    default="nats",
    show_default=True,
    help="Blocks of a server's configuration, rows, or commands.",
)
@click.option(
    "--check", is_flag=True, help="Compare with the permissions that the users have; exit 1 if one is missing."
)
@configured
def permissions(settings: "Settings", name: str | None, form: str, check: bool) -> int:
    """Print the least permissions that the user of each connection needs.

    Subjects that the configuration does not name come from the servers.
    """
    from sr_assets.settings.needed_permissions import needed_permissions
    from sr_assets.stages.connection_users import all_users, ask_servers, list_users, nats_blocks, nsc_commands, row

    entries = None if name is None else settings.find(name)
    facts = ask_servers(settings, entries)
    clusters = list_users(needed_permissions(settings, facts, entries))
    if check:
        return _check(all_users(clusters), form)
    if form == "json":
        echo_document(json.dumps([row(user, need) for user in all_users(clusters) for need in user.needs], indent=1))
    else:
        echo_document({"nats": nats_blocks, "nsc": nsc_commands}[form](clusters))
    return 0


def _check(users: "list[User]", form: str) -> int:
    """Print each missing permission; return the exit code."""
    from sr_assets.stages.connection_users import compare_permissions, row, unknown_text

    comparisons = compare_permissions(users)
    problems = [problem for comparison in comparisons for problem in comparison.problems]
    if form == "json":
        checked = [(comparison, need) for comparison in comparisons for need in comparison.user.needs]
        echo_document(
            json.dumps([row(each.user, need) | {"granted": each.granted(need)} for each, need in checked], indent=1)
        )
    elif not problems:
        echo(f"{len(users)} users have all permissions")
    for need in (need for user in users for need in user.unknown):
        print_warning(f"{need.role} {need.about}: not checked: {unknown_text(need)}")
    for problem in problems:
        print_error(problem)
    return int(bool(problems))
