"""What starts Dagster: its instance, the services of `sr-assets up`, the runs of `sr-assets run`.

Here: folders, child processes, signals, exit codes. Not here: what a run does (`assets`, `stages`), when the sensor asks
for one (`automation`).
"""

from sr_assets.operate.instance import check_home, prepare_instance
from sr_assets.operate.processes import interrupted_in_order, stop_groups
from sr_assets.operate.report import failures
from sr_assets.operate.runs import run_sites
from sr_assets.operate.services import Services, serve
from sr_assets.operate.site import run_site

__all__ = [
    "Services",
    "check_home",
    "failures",
    "interrupted_in_order",
    "prepare_instance",
    "run_site",
    "run_sites",
    "serve",
    "stop_groups",
]
