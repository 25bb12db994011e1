"""Processes around Dagster: its instance, the services of `sr-assets up`, the runs of `sr-assets run`."""

from sr_assets.operate.instance import check_home, prepare_instance
from sr_assets.operate.processes import signals_as_interrupt, stop_groups
from sr_assets.operate.runs import run_sites
from sr_assets.operate.services import Services, serve
from sr_assets.operate.site_job import execute_site
from sr_assets.operate.ui_access import Ui

__all__ = [
    "Services",
    "Ui",
    "check_home",
    "execute_site",
    "prepare_instance",
    "run_sites",
    "serve",
    "signals_as_interrupt",
    "stop_groups",
]
