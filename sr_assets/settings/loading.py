"""Loading the Settings: the only reader of the file and the environment."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from pydantic import ValidationError

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.secrets import MASK, as_text, looks_secret
from sr_assets.settings.cluster_urls import TlsBlock, parse_cluster, with_security
from sr_assets.settings.data import MISSING, SourceSettings
from sr_assets.settings.document import Location, foreign_writer, read_tree, refuse, with_environment, with_folders
from sr_assets.settings.mapping import Key
from sr_assets.settings.references import Fixed, Loaded, Origin, Reader, Resolver, problem_of, references_in, sources_of
from sr_assets.settings.top_level import Settings
from sr_assets.settings.values import shown

DEFAULT_CONFIG = Path("conf/replication.yaml")
#: The configuration of the packages, for commands in a folder without one.
_INSTALLED: Final = Path("/etc/sr-assets/replication.yaml")
#: The file with the static values that `up` and `run` read at their start, for their child processes.
VALUES_VARIABLE: Final = "SR_ASSETS_DATA_VALUES"
_SCHEMA: Final = Key(Settings)


def load_settings(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read and check the configuration: `path`, else SR_ASSETS_CONFIG, else `conf/replication.yaml`.

    Without the latter, it is `/etc/sr-assets/replication.yaml`. Raises ConfigurationError in one line with the file, the
    stream, the key and the allowed values; of several errors it shows the first and counts the others. It shows no URL and no
    part of one. It also raises it for a configuration that another user may have placed. Raises RunError if a source of `data`
    is unavailable and its value was never read before.
    """
    path = configured_path(path, environ)
    written = read_tree(path)
    tree = with_environment(written, environ, partial(refuse, path, written))
    return _load(path, written, tree, environ.get("SR_ASSETS_HOME"), handed_down(environ))


def configured_path(path: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the configuration's file; raises ConfigurationError if another user may have placed or changed it.

    It runs commands and sends variables of the environment to servers that it names. A named file may belong to a user whom
    the operator trusts by naming it, and its folder may be shared, as in a pod; `check`, `run` and `up` warn of both.
    """
    if named := path or environ.get("SR_ASSETS_CONFIG"):
        path = Path(named)
        if (problem := foreign_writer(path)) and problem.startswith("every user"):
            raise ConfigurationError(f"{problem}; let only its owner write it (chmod o-w), or mount it read-only")
        return path
    if not DEFAULT_CONFIG.exists() and _INSTALLED.exists():
        return configured_path(_INSTALLED, {})
    if problem := foreign_writer(*with_folders(DEFAULT_CONFIG), Path.cwd()):
        raise ConfigurationError(
            f"{DEFAULT_CONFIG}: {problem}, and could run commands as you; if you trust it, name the file by --config"
        )
    return DEFAULT_CONFIG


class Sources(NamedTuple):
    """The home and the sources of a configuration whose other values are not read.

    `secrets` are the `source/key` to which a secret key refers, or a block with one.
    """

    home: Path
    data: Mapping[str, SourceSettings]
    secrets: frozenset[str]


def load_sources(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Sources:
    """Read only the sources, for a configuration that waits for a value in one of them. Raises as `load_settings`."""
    path = configured_path(path, environ)
    written = read_tree(path)
    refuse_at = partial(refuse, path, written)
    tree = with_environment(written, environ, refuse_at)
    resolver = Resolver(sources_of(tree, refuse_at), _reader(), refuse_at, handed_down(environ), _SCHEMA)
    resolver.home = _home(resolver, tree, environ.get("SR_ASSETS_HOME"))
    sources = {name: resolver.source(name, ("data", name)) for name in resolver.sources}
    references = references_in(tree)
    return Sources(
        resolver.home, sources, frozenset(label for loc, label in references if _SCHEMA.at(*loc).holds_secret)
    )


def reload_dynamic(settings: Settings) -> Settings:
    """Return Settings with the dynamic values that their sources hold now; all other values stay."""
    loaded = settings.loaded
    if loaded is None or not loaded.dynamic:
        return settings
    fixed = {(label, False): value_of(origin) for label, origin in loaded.static.items()}
    latest = loaded.latest[-1] if loaded.latest else settings
    current = _load(loaded.path, loaded.written, loaded.tree, str(settings.home), fixed, latest)
    # A deployment's code may have chosen its place in Dagster, which stays.
    return current if current.dagster == settings.dagster else current.changed(dagster=settings.dagster)


def reread_static(settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the value at the start and the present one of each static value, by `source/key`, that can be read now."""
    loaded = settings.loaded
    if loaded is None:
        return {}
    refuse_at = partial(refuse, loaded.path, loaded.written)
    resolver = Resolver(sources_of(loaded.tree, refuse_at), _reader(), refuse_at, {}, _SCHEMA)
    values = {}
    for loc, origin in loaded.origins.items():
        reference = origin.reference
        if reference.dynamic:
            continue
        written = {"data": reference.label} | ({} if reference.default is MISSING else {"default": reference.default})
        with contextlib.suppress(ConfigurationError, RunError):
            values[reference.label] = origin.value, resolver.filled(written, loc)
    return values


def value_of(origin: Origin) -> Any:
    """Return the value that a source held, MISSING if the default took its place."""
    return MISSING if origin.kind == "default" else origin.value


def hand_down(settings: Settings) -> str:
    """Return the text of the file of VALUES_VARIABLE for child processes: the static values of `settings`."""
    origins = settings.loaded.static.items() if settings.loaded else ()
    return json.dumps({label: [] if value_of(o) is MISSING else [o.value] for label, o in origins})


def handed_down(environ: Mapping[str, str]) -> Fixed:
    """Return the static values that the parent process read at its start; none after its end."""
    try:
        values = json.loads(Path(environ[VALUES_VARIABLE]).read_text())
    except (KeyError, FileNotFoundError):
        return {}
    return {(label, False): value[0] if value else MISSING for label, value in values.items()}


def _load(
    path: Path, written: Any, tree: dict[Any, Any], home: str | None, fixed: Fixed, latest: Settings | None = None
) -> Settings:
    """Return the Settings of a tree; of `latest`, if the dynamic values are the same, only the origins are new."""
    refuse_at = partial(refuse, path, written)
    sources = sources_of(tree, refuse_at)
    warnings: dict[str, None] = {}
    known = dict(fixed)
    while True:
        resolver = Resolver(sources, _reader(), refuse_at, known, _SCHEMA)
        filled = _filled(resolver, tree, home)
        warnings |= resolver.warnings
        loaded = Loaded(path, written, tree, resolver.origins, tuple(warnings))
        if latest is not None and latest.loaded is not None and latest.loaded.values == loaded.values:
            return latest.changed(loaded=loaded)
        try:
            settings = Settings.model_validate(filled)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            warning = _replaced(resolver, problems, known)
            if warning is None:
                _refuse_first(resolver, problems)
            warnings |= warning
            continue
        settings = settings.changed(home=Path.cwd() / Path(home).expanduser() if home else Path.cwd() / settings.home)
        return settings.changed(loaded=loaded)


def _filled(resolver: Resolver, tree: dict[Any, Any], home: str | None) -> dict[Any, Any]:
    """Return the tree with all values; the home comes first, because it holds the last known values."""
    resolver.home = _home(resolver, tree, home)
    names = {str(key).lower(): key for key in tree}
    filled = {
        key: resolver.filled(value, (str(key).lower(),)) for key, value in tree.items() if key != names.get("data")
    }
    if resolver.sources:
        for name in resolver.sources:
            resolver.source(name, ("data", name))
        filled["data"] = {name: resolver.source_tree(name) for name in resolver.sources}
    return filled


def _home(resolver: Resolver, tree: dict[Any, Any], home: str | None) -> Path:
    """Return the home: `home`, else the file's, which may be a reference."""
    for key, value in tree.items():
        if not home and str(key).lower() == "state_store" and (named := resolver.filled(value, ("state_store",))):
            home = named if isinstance(named, str) else None
    return Path.cwd() / Path(home or ".sr_assets").expanduser()


def _replaced(resolver: Resolver, problems: list[Any], known: dict[Any, Any]) -> dict[str, None] | None:
    """Replace bad dynamic values by the last known ones; return the warnings, or None if that is impossible."""
    warnings: dict[str, None] = {}
    for problem in problems:
        for loc, origin in _origins_at(resolver, problem["loc"]):
            label = origin.reference.label
            earlier = resolver.reader.earlier(resolver.home, label) if resolver.home else None
            if not origin.reference.dynamic or (label, True) in known or earlier is None:
                continue
            known[label, True] = earlier.value
            bad = _masked_problem(label, origin, problem_of(problem))
            use = f"put a valid value; using {origin.quoted(earlier.value)}, read {earlier.age} ago"
            try:
                resolver.refuse(loc, f"data {label}: {bad}; {use}")
            except ConfigurationError as error:
                warnings[str(error)] = None
    return warnings or None


def _masked_problem(label: str, origin: Origin, text: str) -> str:
    """Return a problem without a value that looks like a secret, also where the problem shows only its beginning."""
    if origin.secret or looks_secret(label, as_text(origin.value)):
        for part in _parts(origin.value):
            for form in (shown(part), repr(part), as_text(part)):
                text = text.replace(form, MASK) if form else text
    return text


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and all values inside it, outer ones first."""
    yield value
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def _origins_at(resolver: Resolver, loc: tuple[Any, ...]) -> list[tuple[Location, Origin]]:
    """Return the origin of the value at a location or around it, else those of the values inside."""
    at = tuple(part.lower() if isinstance(part, str) else part for part in loc)
    for end in range(len(at), 0, -1):
        if at[:end] in resolver.origins:
            return [(at[:end], resolver.origins[at[:end]])]
    return [(inner, origin) for inner, origin in resolver.origins.items() if inner[: len(at)] == at]


def _refuse_first(resolver: Resolver, problems: list[Any]) -> NoReturn:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    text = problem_of(problems[0]) + more
    loc = problems[0]["loc"]
    for inner, origin in _origins_at(resolver, loc):
        # An error about a block begins with the key that it is about.
        if len(inner) > len(loc) and not text.startswith(f"{inner[-1]}:"):
            continue
        label = origin.reference.label
        where = "the default" if origin.kind == "default" else origin.source
        text = f"data {label}: {_masked_problem(label, origin, text)}; change {origin.quoted()} in {where}"
        break
    resolver.refuse(loc, text)


def _reader() -> Reader:
    """Return the reader of sources: the only import of an outer ring, so that callers need not pass one."""
    from sr_assets.adapters.data import READER

    return READER


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
        raise ConfigurationError(f"--ca, --cert, --key: {problem_of(error.errors(include_url=False)[0])}") from None
