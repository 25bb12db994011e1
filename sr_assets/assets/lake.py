"""The lake of a stream as an asset: its messages in partitioned files, appended by a query on the Spark engine.

It is not part of the site's computation, which waits for no engine. No `from __future__ import annotations`: Dagster reads the
annotations of an asset's function.
"""

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Final

import dagster as dg

from sr_assets.adapters.logs import configure_logging, note_run
from sr_assets.adapters.spark.run_session import SparkConnection, engine_of
from sr_assets.assets.checks import check_specs, warning
from sr_assets.assets.specs import column_metadata, entry_spec, stream_key
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, StandbyError
from sr_assets.resources import MISCONFIGURED, platform_of, resource_keys, spark_of
from sr_assets.settings import Settings, StreamSettings
from sr_assets.stages.lake_filling import fill

_NO_GAP: Final = {"no_gap": "No message expired before the lake read it."}


def build_lake_assets(settings: Settings, sites: Collection[str]) -> list[dg.AssetsDefinition]:
    """Return the asset of each stream of these sites with the block `lake`."""
    return [_build_lake_asset(settings, stream) for stream in settings.streams if stream.lake and stream.name in sites]


def _build_lake_asset(configured: Settings, stream: StreamSettings) -> dg.AssetsDefinition:
    assert stream.lake is not None
    key, label = stream_key(configured, stream, "lake"), stream.label
    text = f"Every message of stream {stream.stream} in {stream.lake.format} files below {stream.lake.path}."

    @dg.multi_asset(
        name="_".join(key.path),
        specs=[
            entry_spec(
                configured, stream, "lake", ["source"], text, "lake.md#the-files", kinds={"spark", stream.lake.format}
            )
        ],
        check_specs=check_specs(key, _NO_GAP),
        required_resource_keys=resource_keys(configured, "platform", "spark"),
    )
    def lake(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        platform = platform_of(context, configured)
        spark = spark_of(context, configured)
        settings, run_id = platform.current().settings, context.run.run_id
        configure_logging(settings)
        note_run(stream.name, run_id)
        entry = next(each for each in settings.streams if each.label == label)
        engine = engine_of(spark, settings.home.resolve())
        try:
            # No site's operations have this tag, because no site's name contains a slash.
            with closing(SparkConnection(engine, settings.spark.from_messages, f"{label}/lake")) as connection:
                report = fill(settings, entry, connection, run_id)
        except StandbyError as standby:
            context.log.info(str(standby))
            return
        except SrAssetsError as error:
            misconfigured = {MISCONFIGURED: isinstance(error, ConfigurationError)}
            raise dg.Failure(str(error), metadata=misconfigured, allow_retries=False) from None
        path = {"path": dg.MetadataValue.path(report.path)}
        yield dg.MaterializeResult(key, metadata={**asdict(report), **path, **column_metadata("lake")})
        yield warning(key, "no_gap", report.lost == 0, {"messages": report.lost})

    return lake
