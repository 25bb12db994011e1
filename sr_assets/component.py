"""The platform as a guest of somebody else's Dagster deployment: a factory of definitions, and a component for `dg`.

A guest touches only what is its own. Nothing runs before its host switches it on, and its names can have a prefix.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import dagster as dg
from dagster_duckdb import DuckDBResource
from pydantic import Field, ValidationError

from sr_assets.dagster_internals import component_key
from sr_assets.definitions import build_platform
from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.resources import DataSources, Platform
from sr_assets.settings import DagsterSettings, Settings, load_settings
from sr_assets.settings.references import problem_of

#: Whether sensors or schedules are defined, and whether they run: `True` leaves that to the configuration.
Automation = bool | Literal["running", "stopped"]

_CONFIGURATION: Final = """\
# The streams to copy; docs/configuration.md describes all keys.
name: NAME
state_store: .sr_assets
streams:
  - stream: STREAM
    source_url: nats://source.example.net:4222
    target_url: nats://target.example.net:4222
"""


def build_definitions(
    config: str | Path | Settings,
    *,
    sites: Sequence[str] | None = None,
    key_prefix: str | Sequence[str] = (),
    group_prefix: str = "",
    sensors: Automation = True,
    schedules: Automation = True,
    retention: bool | None = None,
    failure_sensor: Literal["own", "none"] = "own",
    resources: Mapping[str, Any] | None = None,
) -> dg.Definitions:
    """Return the platform's definitions for a deployment of somebody else, to merge with other definitions.

    `config` is the path of a configuration, or its settings. `sites` are those to define, by default all. `key_prefix` and
    `group_prefix` replace the ones of the block `dagster`. Sensors and schedules are STOPPED unless "running" or the
    configuration says otherwise; False leaves them out. `retention`: the nightly deletion of the platform's own old runs is
    RUNNING, left out, or as the configuration says. `failure_sensor` "own" reports the platform's failed runs to `notify`.
    `resources` replaces `platform`, `spark` or `fleet_tables`, or adds others.

    Raises ConfigurationError, in one line, for a bad configuration or argument.
    """
    settings = config if isinstance(config, Settings) else load_settings(Path(config))
    prefix = [key_prefix] if isinstance(key_prefix, str) else list(key_prefix)
    named = {"key_prefix": prefix, "group_prefix": group_prefix, "sensors": sensors, "schedules": schedules}
    chosen = {name: value for name, value in named.items() if value and value is not True}
    try:
        read = DagsterSettings.model_validate(chosen)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = f"{problem['loc'][0]}: " if problem["loc"] else ""
        raise ConfigurationError(f"build_definitions: {key}{problem_of(problem)}") from None
    deployment = settings.dagster.changed(guest=True, **{name: getattr(read, name) for name in chosen})
    if failure_sensor not in ("own", "none"):
        raise ConfigurationError(f"build_definitions: failure_sensor: {failure_sensor!r} is unknown; use own or none")
    _refuse_wrong_types(resources or {})
    kept = settings.run_retention if retention is None else retention
    return build_platform(
        settings.changed(dagster=deployment, run_retention=kept),
        _known_sites(settings, sites),
        resources or {},
        sensors=sensors is not False,
        schedules=schedules is not False,
        retention=retention is not False,
        failure_sensor=failure_sensor == "own",
    )


def _known_sites(settings: Settings, sites: Sequence[str] | None) -> list[str]:
    """Return the sites to define, each once, in the order of the configuration."""
    wanted = [sites] if isinstance(sites, str) else settings.sites if sites is None else sites
    for site in wanted:
        if site not in settings.sites:
            hint, known = did_you_mean(site, settings.sites), ", ".join(settings.sites)
            raise ConfigurationError(f"build_definitions: site {site!r} is not configured; {hint}configured: {known}")
    return [site for site in settings.sites if site in wanted]


def _refuse_wrong_types(resources: Mapping[str, Any]) -> None:
    kinds: dict[str, type] = {"platform": Platform, "fleet_tables": DuckDBResource, "data": DataSources}
    for name, resource in resources.items():
        if isinstance(resource, dg.ResourceDefinition):
            continue
        if name == "spark" and not hasattr(type(resource), "spark_session"):
            raise ConfigurationError(
                f"build_definitions: the resource spark is a {type(resource).__name__};"
                " use a PySparkResource, or any object with spark_session"
            )
        if name in kinds and not isinstance(resource, kinds[name]):
            raise ConfigurationError(
                f"build_definitions: the resource {name} is a {type(resource).__name__}; use a {kinds[name].__name__}"
            )


class _Scaffolder(dg.Scaffolder[dg.Model]):
    """Writes a component with a first configuration next to it."""

    def scaffold(self, request: dg.ScaffoldRequest[dg.Model]) -> None:
        dg.scaffold_component(request, {"config": "replication.yaml"})
        file = Path(request.target_path) / "replication.yaml"
        if not file.exists():
            file.write_text(_CONFIGURATION, encoding="utf-8")


#: The project that is being loaded, and which of its components defines a site of a home, or has a prefix.
_loading: Final = list[tuple[dg.ComponentTree, dict[tuple[str, ...], str]]]()


def _taken_in(project: dg.ComponentTree) -> dict[tuple[str, ...], str]:
    if not _loading or _loading[0][0] is not project:
        _loading[:] = [(project, {})]
    return _loading[0][1]


@dg.scaffold_with(_Scaffolder)
class SrAssetsComponent(dg.Component, dg.Model, dg.Resolvable):
    """Replicates streams between JetStream clusters, samples and tracks their senders, and publishes tables of the fleet."""

    config: Annotated[str, Field(description="The configuration's file; a relative path begins at this folder.")]
    sites: list[str] | None = Field(None, description="The sites to define; by default all.")
    key_prefix: list[str] = Field([], description="The first parts of each asset key, and of the names of jobs.")
    group_prefix: str = Field("", description="The beginning of the name of each group.")
    sensors: bool | Literal["running", "stopped"] = Field(True, description="Whether sensors exist, and run.")
    schedules: bool | Literal["running", "stopped"] = Field(True, description="Whether schedules exist, and run.")
    retention: bool | None = Field(None, description="Whether a nightly job deletes old runs of this platform.")
    failure_sensor: Literal["own", "none"] = Field("own", description="Whether failed runs are reported to `notify`.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions; raises ConfigurationError, in one line, also if two components define the same."""
        settings = load_settings(context.path / self.config)
        definitions = build_definitions(
            settings,
            sites=self.sites,
            key_prefix=self.key_prefix,
            group_prefix=self.group_prefix,
            sensors=self.sensors,
            schedules=self.schedules,
            retention=self.retention,
            failure_sensor=self.failure_sensor,
        )
        prefix = self.key_prefix or settings.dagster.key_prefix
        taken = _taken_in(context.component_tree)
        ours = component_key(context)
        for site in _known_sites(settings, self.sites):
            if (other := taken.setdefault((str(settings.home), site), ours)) != ours:
                raise ConfigurationError(f"{ours}: {other} defines site {site} too; keep it in one of them (`sites`)")
        if (other := taken.setdefault(("key_prefix", *prefix), ours)) != ours:
            named = "/".join(prefix) or "no key_prefix"
            raise ConfigurationError(f"{ours}: {other} has {named} too; give each component its own key_prefix")
        return definitions
