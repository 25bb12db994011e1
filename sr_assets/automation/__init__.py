"""Sensors, jobs and schedules, which start all runs.

A lag sensor (`sensors`) observes its site (`observing`), decides whether it needs a run (`decisions`) and acquires a run slot
(`run_slots`) for the site's job (`jobs`).
"""

from sr_assets.assets.specs import site_job_name
from sr_assets.automation.daily import build_daily_job, build_daily_schedule
from sr_assets.automation.decisions import Decision
from sr_assets.automation.failures import build_failure_sensor
from sr_assets.automation.jobs import build_site_job, sites_to_load
from sr_assets.automation.observing import find_work, share_stream_infos
from sr_assets.automation.old_runs import build_retention_schedule, delete_old_runs, retention
from sr_assets.automation.run_slots import RunSlots
from sr_assets.automation.sensors import build_lag_sensor
from sr_assets.automation.topology import build_topology_job, build_topology_sensor

__all__ = [
    "Decision",
    "RunSlots",
    "build_daily_job",
    "build_daily_schedule",
    "build_failure_sensor",
    "build_lag_sensor",
    "build_retention_schedule",
    "build_site_job",
    "build_topology_job",
    "build_topology_sensor",
    "delete_old_runs",
    "find_work",
    "retention",
    "share_stream_infos",
    "site_job_name",
    "sites_to_load",
]
