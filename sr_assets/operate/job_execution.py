"""Execution of a site's job, recorded in the Dagster instance that `up` uses too.

A site's child imports this module, which takes seconds, while it works: here are all imports that a run needs for Dagster.
"""

from collections.abc import Sequence
from typing import Final

# Dagster's instance and executor import these.
import dagster._core.executor.in_process
import dagster._core.instance.factory
import dagster._core.storage.local_compute_log_manager
import dagster._core.storage.sqlite_storage  # noqa: F401
from dagster import ExecuteInProcessResult, JobDefinition

from sr_assets.adapters.logs import print_error
from sr_assets.assets.specs import entry_path, site_job_name
from sr_assets.definitions import build_sites
from sr_assets.domain.errors import RunError
from sr_assets.operate.instance import prepared_instance
from sr_assets.resources import LINGER, MODE_TAG, ONCE
from sr_assets.settings import Entry, Settings


class SiteJob:
    """A site's job."""

    def __init__(self, settings: Settings, site: str) -> None:
        self._entries = settings.sites[site]
        self._job: Final[JobDefinition] = build_sites(settings, [site]).resolve_job_def(site_job_name(settings, site))

    def execute(self, run_id: str, entries: Sequence[Entry], *, once: bool) -> ExecuteInProcessResult | None:
        """Run the job for some entries of the site, as the run `run_id`.

        Without `once`, the run lingers; print an error of Dagster's storage, which may be back soon, and return None.
        """
        prefixes = [entry.asset_prefix for entry in entries]
        keys = self._job.asset_layer.executable_asset_keys
        try:
            with prepared_instance() as instance:
                return self._job.execute_in_process(
                    instance=instance,
                    asset_selection=None
                    if len(entries) == len(self._entries)
                    else [key for key in keys if entry_path(key) in prefixes],
                    tags={MODE_TAG: ONCE if once else LINGER},
                    raise_on_error=False,
                    run_id=run_id,
                )
        except RunError as error:
            if once:
                raise
            print_error(str(error))
            return None
