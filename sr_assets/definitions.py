"""The table of contents: settings → resources → each stream in flow order, the feeds → fleet tables → automation.

`build` assembles the platform from settings, with any resource replaced by another; `defs` is what Dagster loads, from
the configured file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from sr_assets.assets.entries import entry_assets
from sr_assets.assets.fleet import build_fleet_assets
from sr_assets.assets.sites import build_site_assets
from sr_assets.automation import build_lag_sensor, build_retention_schedule, build_site_job, retention
from sr_assets.resources import FleetTables, Platform, spark_resource
from sr_assets.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import Settings


def build(settings: Settings, resources: Mapping[str, Any] | None = None) -> dg.Definitions:
    """Return everything Dagster knows of the platform.

    Resources are `platform` for our own assets, `fleet_tables` and `spark` for assets that others build on them;
    `resources` replace those of the same name, and may add others.
    """
    sources = [spec for entry in settings.entries for spec in entry_assets(entry).source_specs(settings.streams)]
    sites = [build_site_assets(settings, name) for name in settings.sites]
    return dg.Definitions(
        assets=[*sources, *sites, build_fleet_assets(settings.streams, settings.feeds)],
        jobs=[*map(build_site_job, settings.sites), retention],
        sensors=[build_lag_sensor(settings, name) for name in settings.sites],
        schedules=[build_retention_schedule()],
        resources={**_build_resources(settings), **(resources or {})},
        executor=dg.in_process_executor,
    )


def _build_resources(settings: Settings) -> dict[str, Any]:
    return {
        "platform": Platform(settings=settings),
        "fleet_tables": FleetTables(database=str(settings.home / "fleet.duckdb")),
        "spark": spark_resource(settings),
    }


@dg.definitions
def defs() -> dg.Definitions:
    """Return the platform of the configured file (`SR_ASSETS_CONFIG`, else `conf/replication.yaml`)."""
    return build(load_settings())
