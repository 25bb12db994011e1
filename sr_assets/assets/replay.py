"""The asset `fleet/replay`: a replay of a stream under durations that the launchpad sets, next to the record.

No `from __future__ import annotations`: Dagster reads the annotations of an asset's function.
"""

from collections.abc import Callable
from typing import Any

import dagster as dg
from pydantic import Field

from sr_assets.adapters.spark.run_session import engine_of
from sr_assets.assets.charts import line_chart
from sr_assets.assets.specs import ROW_COUNT, common_spec, markdown_table, table_key
from sr_assets.domain.errors import ConfigurationError, SrAssetsError
from sr_assets.resources import platform_of, resource_keys, spark_of
from sr_assets.settings import Settings, parse_duration
from sr_assets.settings.values import read_time
from sr_assets.stages.replay import FEED_REFUSED, Replay, Wanted, replay


class ReplayConfig(dg.Config):
    """The stream and the range of a replay, and durations instead of the configured ones."""

    stream: str = Field(description="The stream (or name/stream).")
    since: str | None = Field(
        None, description="Begin at this time, in RFC 3339; by default the earliest possible one."
    )
    until: str | None = Field(None, description="End before this time; by default the end of the record.")
    warn_duration: str | None = Field(None, description="Silence for longer than this, such as 30m, is a timeout.")
    inspect_duration: str | None = Field(None, description="Sampling interval; longer silence retires a node.")


def build_replay_asset(configured: Settings) -> dg.AssetsDefinition:
    """Return the asset; each materialisation is one replay."""

    def compute(context: dg.AssetExecutionContext, config: ReplayConfig) -> dg.MaterializeResult[None]:
        platform = platform_of(context, configured)
        spark = spark_of(context, configured)
        settings = platform.settings
        try:
            stream = settings.stream_named(config.stream, FEED_REFUSED)
            wanted = Wanted(
                _read("since", read_time, config.since),
                _read("until", read_time, config.until),
                _read("warn_duration", parse_duration, config.warn_duration),
                _read("inspect_duration", parse_duration, config.inspect_duration),
            )
            return dg.MaterializeResult(
                metadata=_metadata(replay(settings, stream, wanted, engine_of(spark, settings.home.resolve())))
            )
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None

    asset: dg.AssetsDefinition = dg.asset(
        key=table_key(configured, "replay"),
        required_resource_keys=resource_keys(configured, "platform", "spark"),
        deps=[table_key(configured, "node_advisories")],
        **common_spec(
            configured,
            "fleet",
            {"nats", "spark"},
            "Transitions, copies and silent nodes of a stream under other durations, next to the recorded ones.",
            "replay.md#choose-durations",
        ),
    )(compute)
    return asset


def _read(key: str, reader: Callable[[str], int], text: str | None) -> int | None:
    """Return a value of the launchpad in ns; raises ConfigurationError that names its key."""
    try:
        return reader(text) if text else None
    except (ValueError, ConfigurationError) as error:
        raise ConfigurationError(f"{key}: {error}") from None


def _metadata(result: Replay) -> dict[str, Any]:
    """Return the counts, a table of both sides, and a plot of the advisories by day."""
    rows = [[kind, str(replayed), str(recorded)] for kind, replayed, recorded in result.both_sides]
    lines = {
        "replayed": [(str(day.date), float(day.advisories)) for day in result.days],
        "recorded": [(str(day.date), float(day.recorded)) for day in result.days],
    }
    document = result.document
    return {
        ROW_COUNT: sum(result.transitions.values()),
        "stream": f"{result.name}/{result.stream}",
        **{name: document[name].isoformat() for name in ("since", "until")},
        **{name: document[f"{name}_seconds"] for name in ("warn_duration", "inspect_duration")},
        **result.totals,
        "comparison": markdown_table(("kind", "replayed", "recorded"), rows),
        "advisories": line_chart("advisories by day", "advisories", lines),
    }
