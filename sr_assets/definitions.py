"""Dagster's entry point: the definitions of all assets, jobs, sensors, schedules and resources."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from sr_assets.adapters.garbage import gc_paused
from sr_assets.adapters.spark.config import is_cluster
from sr_assets.assets.daily import AVAILABILITY_ASSET, INVENTORY_ASSET, build_daily_asset
from sr_assets.assets.entry_assets import entry_assets
from sr_assets.assets.fleet import build_fleet_assets
from sr_assets.assets.lake import build_lake_assets
from sr_assets.assets.replay import build_replay_asset
from sr_assets.assets.sites import build_site_assets
from sr_assets.assets.specs import site_job_name
from sr_assets.assets.topology import build_topology_assets
from sr_assets.automation.failures import build_failure_sensor
from sr_assets.automation.jobs import (
    JOB_TAG,
    LAKES,
    SITE_TAG,
    build_daily_job,
    build_daily_schedule,
    build_lakes_schedule,
    resolve_job,
    sites_to_load,
)
from sr_assets.automation.observing import share_stream_infos
from sr_assets.automation.old_runs import build_retention
from sr_assets.automation.run_processes import share_run_imports
from sr_assets.automation.sensors import ConfigurationFile, RunSlots, build_lag_sensor
from sr_assets.automation.topology import JOB, build_topology_sensor
from sr_assets.dagster_internals import repository_of
from sr_assets.resources import DataSources, FleetTables, FleetTablesIOManager, Platform, resource_keys, spark_resource
from sr_assets.settings import Settings, load_settings


def build(settings: Settings, resources: Mapping[str, Any] | None = None) -> dg.Definitions:
    """Return the definitions of the platform for a code location of its own.

    The resources are `platform` for the platform's assets, `spark` for the daily tables and users' assets, and `fleet_tables` and
    `data` for users' assets. `resources` replaces resources by name or adds more.
    """
    share_run_imports()
    platform = build_platform(settings, list(settings.sites), resources or {})
    return dg.Definitions.merge(platform, dg.Definitions(executor=dg.in_process_executor))


def build_platform(
    settings: Settings,
    names: Sequence[str],
    given: Mapping[str, Any],
    *,
    sensors: bool = True,
    schedules: bool = True,
    retention: bool = True,
    failure_sensor: bool = True,
) -> dg.Definitions:
    """Return the definitions of these sites and of what the sites share; `given` replaces resources by name or adds more.

    Without `sensors`, `schedules`, `retention` or the `failure_sensor`, these are left out.
    """
    provided = _build_resources(settings, given)
    sites = [_site_parts(settings, name, provided) for name in names]
    native = build_topology_assets(settings) if settings.topology else []
    # With these, Spark may compute the daily tables; otherwise no size is worth an engine.
    may_use_spark = "spark" in given or settings.spark.from_messages is not None or is_cluster(settings.spark.mode)
    daily = {
        asset.stage: build_daily_asset(settings, asset, may_use_spark=may_use_spark)
        for asset in (AVAILABILITY_ASSET, INVENTORY_ASSET)
    }
    hourly = {stage: build_daily_job(settings, stage, asset) for stage, asset in daily.items()}
    lakes = build_lake_assets(settings, names)
    shared = [*native, build_fleet_assets(settings, names), *daily.values(), *lakes, build_replay_asset(settings)]
    own = {key: provided[key] for key in resource_keys(settings, "platform", "spark")}
    surveying = "Survey the native streams, and create or update them as `manage` allows."
    topology_jobs = [resolve_job(settings.dagster.name(JOB), surveying, native, own, {JOB_TAG: JOB})] if native else []
    filling = "Append the new messages of each stream with a lake to its files."
    lake_jobs = [resolve_job(settings.dagster.name(LAKES), filling, lakes, own, {JOB_TAG: LAKES})] if lakes else []
    assets = [*(asset for assets, _ in sites for asset in assets), *shared]
    jobs = [*(job for _, job in sites), *topology_jobs, *hourly.values(), *lake_jobs]
    nightly = [build_retention(settings, assets, [job.name for job in jobs])] if retention else []
    shared_by_sensors = share_stream_infos(settings), RunSlots(settings), ConfigurationFile(settings)
    lag_sensors = [build_lag_sensor(settings, name, *shared_by_sensors) for name in names]
    hourly_schedules = [
        build_daily_schedule(settings, stage, job, minute=7 + 10 * number)
        for number, (stage, job) in enumerate(hourly.items())
    ]
    return dg.Definitions(
        assets=assets,
        jobs=[*jobs, *(job for job, _ in nightly)],
        sensors=[
            *([*lag_sensors, *([build_topology_sensor(settings)] if native else [])] if sensors else []),
            *([build_failure_sensor(settings)] if failure_sensor else []),
        ],
        schedules=[
            *(schedule for _, schedule in nightly),
            *([*hourly_schedules, *(build_lakes_schedule(settings, job) for job in lake_jobs)] if schedules else []),
        ],
        resources=provided,
    )


def build_sites(settings: Settings, names: Sequence[str]) -> dg.Definitions:
    """Return the definitions that runs of these sites need: their assets, jobs and resources."""
    resources = _build_resources(settings, {})
    sites = [_site_parts(settings, name, resources) for name in names]
    return dg.Definitions(
        assets=[asset for assets, _ in sites for asset in assets],
        jobs=[job for _, job in sites],
        resources=resources,
        executor=dg.in_process_executor,
    )


def _site_parts(
    settings: Settings, name: str, resources: Mapping[str, Any]
) -> tuple[list[dg.AssetsDefinition | dg.AssetSpec], dg.JobDefinition]:
    sources = [spec for entry in settings.sites[name] for spec in entry_assets(entry).source_specs(settings)]
    assets: list[dg.AssetsDefinition | dg.AssetSpec] = [*sources, build_site_assets(settings, name)]
    description = f"Replicate, track and advise for every stream of site {name}."
    needed = {key: resources[key] for key in resource_keys(settings, "platform", "spark")}
    return assets, resolve_job(site_job_name(settings, name), description, assets, needed, {SITE_TAG: name})


def _build_resources(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of the platform's own assets and of users' assets, and the other `given` ones.

    A deployment of somebody else gets no `spark` and no `data`: it may have its own.
    """
    deployment = settings.dagster
    known: dict[str, Any] = {
        "platform": Platform(settings=settings),
        "spark": spark_resource(settings),
        "fleet_tables": FleetTables(database=str(settings.home / "fleet.duckdb")),
        "data": DataSources(settings=settings),
        "fleet_tables_io_manager": FleetTablesIOManager(settings.home),
    }
    own_names = ("platform", "spark", "fleet_tables_io_manager")
    own = {deployment.resource(name): given.get(name, known[name]) for name in own_names}
    if deployment.guest:
        known = {"fleet_tables": known["fleet_tables"]}
    public = {deployment.name(name): given.get(name, resource) for name, resource in known.items()}
    return (
        own
        | public
        | {name: resource for name, resource in given.items() if name not in known and name not in own_names}
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Return the platform of the configured file (`SR_ASSETS_CONFIG`, else `conf/replication.yaml`).

    A run's process loads only the sites with an active run.
    """
    with gc_paused():
        settings = load_settings()
        names = sites_to_load(settings)
        platform = build(settings) if len(names) == len(settings.sites) else build_sites(settings, names)
        # Dagster requests the repository next; it is built only once.
        repository_of(platform)
    return platform
