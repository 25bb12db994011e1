"""Loading the Settings: the only reader of the file and the environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings.clusters import parse_cluster
from sr_assets.settings.deployment import Settings
from sr_assets.settings.document import read_tree, refuse, with_environment
from sr_assets.settings.links import TlsBlock, with_security

DEFAULT_CONFIG = Path("conf/replication.yaml")


def load_settings(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read and check the configuration: `path`, else SR_ASSETS_CONFIG, else `conf/replication.yaml`.

    Raises ConfigurationError in one line with the file, the stream, the key and the allowed values; of several errors
    it shows the first and counts the others. It shows no URL and no part of one.
    """
    path = path or Path(environ.get("SR_ASSETS_CONFIG") or DEFAULT_CONFIG)
    tree = read_tree(path)
    try:
        settings = Settings.model_validate(
            with_environment(tree, environ, lambda loc, problem: refuse(path, tree, loc, problem))
        )
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        refuse(path, tree, problems[0]["loc"], _problem(problems[0]) + more)
    home = environ.get("SR_ASSETS_HOME") or settings.home
    return settings.changed(home=Path.cwd() / Path(home).expanduser())


def load_cluster(
    url: str, tls: Mapping[str, str | None], environ: Mapping[str, str] = os.environ, *, named: str = "--url"
) -> ClusterSettings:
    """Return the cluster of a URL and a `tls` block (ca, cert, key) given without a file.

    `named` is the option of the URL, for an error. The environment replaces `${NAME}`, as in a file. Raises
    ConfigurationError in one line without any part of the URL.
    """

    def refuse_url(_: object, problem: str) -> NoReturn:
        raise ConfigurationError(f"{named}: {problem}")

    try:
        cluster = parse_cluster(with_environment(url, environ, refuse_url))
    except ValueError as error:
        refuse_url((), str(error))
    try:
        return with_security(cluster, [TlsBlock.model_validate(dict(tls))])
    except ValidationError as error:
        raise ConfigurationError(f"--ca, --cert, --key: {_problem(error.errors(include_url=False)[0])}") from None


def _problem(error: Mapping[str, Any]) -> str:
    """Return the message for a value that pydantic refused; messages of our validators stay unchanged."""
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is required"
        case "tuple_type":
            return "must be a list, each entry beginning with '- '"
        case "too_short":
            return "is empty; add at least one entry"
        case "dict_type":
            return "must be a mapping of keys to values"
    return str(error["msg"])
