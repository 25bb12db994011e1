"""The command `enroll`: a certificate from a Puppet CA."""

import re
from pathlib import Path

import click

from sr_assets.cli.base import SECONDS, cli, echo


def _identity(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    from sr_assets.settings.names import read_identity

    try:
        return read_identity(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _address(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*):([0-9]{1,5})", value)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise click.BadParameter(f"{value!r} is not host:port")
    return value


def _fingerprint(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    plain = re.sub(r"[\s:]", "", value or "").upper()
    if value is not None and not re.fullmatch(r"[0-9A-F]{64}", plain):
        raise click.BadParameter("is not a SHA-256 fingerprint: 64 hexadecimal digits, with or without colons")
    return plain or None


@cli.command(epilog="Example: sr-assets enroll web1.example.net --dir ssl")
@click.argument("identity", callback=_identity)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory for Puppet's SSL files: ssl_dir of tls with scheme puppet.",
)
@click.option("--ca", default="puppet:8140", show_default=True, callback=_address, help="Address of the CA.")
@click.option("--ca-fingerprint", callback=_fingerprint, help="Required SHA-256 fingerprint of the CA.")
@click.option("--trust-first", is_flag=True, help="Trust the host that responds, without a fingerprint.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=SECONDS,
    default="30m",
    show_default=True,
    help="Maximum time to wait for the certificate.",
)
def enroll(
    identity: str, folder: Path, ca: str, ca_fingerprint: str | None, timeout_seconds: float, *, trust_first: bool
) -> None:
    """Request a certificate for IDENTITY from a Puppet CA and store it with its key.

    An existing key is kept. After an interruption the same command continues. The first command needs --ca-fingerprint or
    --trust-first; without them it prints the fingerprint and ends.
    """
    from sr_assets.adapters.puppet_ca import Enrolment

    Enrolment(identity, folder.absolute(), ca, ca_fingerprint, trust_first).enrol(timeout_seconds, echo)
