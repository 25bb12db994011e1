"""The small blocks of the top level: sensors, Spark, metrics, retention, daily tables."""

import re
from typing import Annotated, Any, Self

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
        "the engine, [local or on a cluster](operations.md#a-spark-cluster)", "connect-local"
    )
    from_messages: Natural | None = file_key(
        "batches from so many messages on go to Spark as soon as the engine is warm, and [daily tables](rules.md#days-in-spark)"
        " from so many nodes on; 0 and 1 send everything, from the first batch on, and a run then waits for the engine",
        None,
        default_text="by [the rule](rules.md#spark-or-the-runs-own-process)",
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
