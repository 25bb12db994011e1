"""The small blocks of the top level: sensors, Spark, metrics, retention, daily tables."""

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import model_validator

from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import read_json_path
from sr_assets.settings.values import (
    Duration,
    File,
    Flag,
    Natural,
    Port,
    Positive,
    Seconds,
    Text,
    Timezone,
    Value,
    as_list,
    choice,
    read_text,
    shown,
)


class SensorSettings(Block):
    """`sensor`: the interval of a site's sensor, and the lag at which it requests a run."""

    interval_ns: Duration = file_key("time between polls", "30s", name="interval")
    lag_messages: Positive = file_key("minimum lag for a run", 1)
    lag_ns: Seconds = file_key("minimum age of the lag for a run", 0, name="lag_seconds")

    @model_validator(mode="after")
    def _not_hectic(self) -> Self:
        if self.interval_ns < SECOND_NS:
            raise ValueError("interval: must be at least 1s")
        return self


#: Dagster allows ten, and an asset has up to four of its own.
_MOST_KINDS: Final = 6
#: Whether Dagster's daemon evaluates a new sensor or schedule.
Status = Literal["running", "stopped"]


def read_key_part(value: object) -> str:
    """Read a part of an asset key, which is also a part of the names of jobs and resources."""
    text = read_text(value)
    if not re.fullmatch(r"[A-Za-z0-9_]+", text):
        raise ValueError(f"{shown(text)} cannot be in the names of Dagster's jobs; use letters, digits and '_'")
    return text


def _read_owner(value: object) -> str:
    text = read_text(value)
    if not re.fullmatch(r"team:[A-Za-z0-9_-]+|[^\s@]+@[^\s@]+\.[^\s@]+", text):
        raise ValueError(f"{shown(text)} is not an owner; use team:NAME or an email address")
    return text


def _read_documents(value: object) -> str:
    text = read_text(value).rstrip("/")
    if not re.match(r"https?://[^/\s]|/", text):
        raise ValueError(f"{shown(text)} is not an address; use https://host/path")
    return text


_KeyPart = Annotated[str, Value(read_key_part, type="name")]
_Owner = Annotated[str, Value(_read_owner, type="owner")]


class DagsterSettings(Block):
    """`dagster`: the place of the platform in a Dagster deployment, which it may share with other projects."""

    key_prefix: Annotated[tuple[_KeyPart, ...], Value(as_list, type="name, or a list of names")] = file_key(
        "the first parts of each asset key; the names of jobs, sensors, schedules and resources begin with them",
        [],
        default_text="none",
    )
    group_prefix: _KeyPart | None = file_key("the beginning of the name of each group", None, default_text="none")
    owners: Annotated[tuple[_Owner, ...], Value(as_list, type="`team:NAME`, an email address, or a list")] = file_key(
        "the owners of each asset", ["team:fleet-platform"], default_text="`team:fleet-platform`"
    )
    kinds: Annotated[tuple[_KeyPart, ...], Value(as_list, type="name, or a list of names")] = file_key(
        "a kind of each asset, in addition to its own", [], default_text="none"
    )
    documents: Annotated[str, Value(_read_documents, type="address")] | None = file_key(
        "where descriptions find these documents",
        None,
        default_text="`/docs` of `sr-assets up`; elsewhere no links",
    )
    sensors: Annotated[Status, choice(Status)] = file_key(
        "new sensors in another deployment; those of `sr-assets up` always run", "stopped"
    )
    schedules: Annotated[Status, choice(Status)] = file_key("the same for schedules", "stopped")

    @model_validator(mode="after")
    def _few_kinds(self) -> Self:
        if len(self.kinds) > _MOST_KINDS:
            raise ValueError(f"kinds: at most {_MOST_KINDS}, because an asset has at most ten with its own")
        return self

    #: Whether a code location of somebody else loads the definitions.
    guest: bool = False

    def name(self, text: str) -> str:
        """Return the name of a job, sensor, schedule or resource in this deployment."""
        return "_".join([*self.key_prefix, text])

    def resource(self, name: str) -> str:
        """Return the key of a resource of the platform's own assets, which must not meet a key of somebody else."""
        return "_".join(["sr_assets", *self.key_prefix, name]) if self.guest else self.name(name)

    @property
    def sensors_run(self) -> bool:
        """Whether new sensors run."""
        return not self.guest or self.sensors == "running"

    @property
    def schedules_run(self) -> bool:
        """Whether new schedules run."""
        return not self.guest or self.schedules == "running"

    def group(self, name: str) -> str:
        """Return the name of a group of assets."""
        return f"{self.group_prefix or ''}{name}"


def _spark_mode(value: object) -> str:
    """Read Spark's mode; an address may contain a token, so the error does not show it."""
    text = read_text(value)
    if text not in ("connect-local", "classic") and not re.match(r"(sc|spark)://[^/;]", text):
        raise ValueError("must be connect-local, classic, sc://host:port or spark://host:port")
    return text


def spark_options(value: object) -> dict[str, str]:
    """Read options of Spark; numbers and flags of YAML become text for Spark."""
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of Spark's options")  # noqa: TRY004  as in read_text
    for name, item in value.items():
        if not (isinstance(name, str) and isinstance(item, (str, int, float))):
            raise ValueError(f"{shown(name)} must be text with one value")  # noqa: TRY004  as in read_text
    return {name: str(item).lower() if isinstance(item, bool) else str(item) for name, item in value.items()}


class SparkSettings(Block):
    """`spark`: the engine, and from which size on batches go to it."""

    is_local = True

    mode: Annotated[str, Value(_spark_mode, type="`connect-local`, `classic`, `sc://…`, `spark://…`")] = file_key(
        "the engine, [local or on a cluster](hosts.md#a-spark-cluster)", "connect-local"
    )
    from_messages: Natural | None = file_key(
        "batches from so many messages on, and [daily tables](engine.md#days-in-spark) from so many nodes on, go to Spark once"
        " the engine is warm; 0 and 1 send everything, and a run waits for the engine",
        None,
        default_text="by [the rule](engine.md#spark-or-the-runs-own-process)",
    )
    config: Annotated[dict[str, str], Value(spark_options, type="mapping")] = file_key(
        "Spark options; with `sc://…`, session options", {}, default_text="none"
    )

    @property
    def public(self) -> dict[str, Any]:
        """The public part: the mode without its parameters, and no value whose key may name a secret."""
        secret = re.compile(r"secret|password|token|credential|key", re.IGNORECASE)
        config = {name: value for name, value in self.config.items() if not secret.search(name)}
        return {"mode": self.mode.partition(";")[0].rpartition("@")[2], "config": config}

    def __repr_args__(self) -> Any:
        """Return only the public part."""
        return self.public.items()


class MetricsSettings(Block):
    """`metrics`: `port` None or 0 serves none, `textfile` None writes none."""

    port: Port | None = file_key("the port of `/metrics`", None)
    host: Text = file_key("its address", "127.0.0.1", local=True)
    legacy: Flag = file_key("also export the names of the Stream Replicator's first generation", False)
    textfile: File | None = file_key("a file for the node exporter", None)


class HealthSettings(Block):
    """`health`: the address of `/healthz` and `/readyz` without a metrics port, which serves them too."""

    port: Port | None = file_key("the port of `/healthz` and `/readyz` if `metrics` has none", None)
    host: Text = file_key("its address", "127.0.0.1", local=True)


class RetentionSettings(Block):
    """`snapshots`, `advisories` and `gaps`."""

    retention_ns: Duration = file_key("retention of the rows", "90d", name="retention")


class DailySettings(Block):
    """`availability`: the days of a daily table."""

    timezone: Timezone = file_key("the time zone of the days", "UTC")
    retention_ns: Duration = file_key("retention of the days", "2Y", name="retention")


def _facts(value: object) -> tuple[str, ...]:
    """Read the paths of facts."""
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is not a list; use [os.name, role]")  # noqa: TRY004  pydantic requires ValueError
    facts = tuple(read_text(item) for item in value)
    for fact in facts:
        read_json_path(fact)
        if facts.count(fact) > 1:
            raise ValueError(f"names {shown(fact)} twice; remove one")
    return facts


class InventorySettings(DailySettings):
    """`inventory`: the days of the table, and the counted facts."""

    facts: Annotated[tuple[str, ...], Value(_facts, type="list of paths")] = file_key(
        r"additional facts to count: `country`, `os.release.major`, `a\.b` for a key with a dot",
        [],
        default_text="none",
    )
