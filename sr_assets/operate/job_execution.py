"""Execution of a site's job, recorded in the Dagster instance that `up` uses too.

A site's child imports this module, which takes seconds, while it works: here are all imports that a run needs for Dagster.
"""

from collections.abc import Sequence
from typing import Final

from dagster import ExecuteInProcessResult, JobDefinition

from sr_assets.adapters.logs import print_error
from sr_assets.assets.entry_assets import entry_assets
from sr_assets.assets.specs import site_job_name
from sr_assets.dagster_internals import import_in_process_run
from sr_assets.definitions import build_sites
from sr_assets.domain.errors import RunError
from sr_assets.operate.instance import prepared_instance
from sr_assets.resources import LINGER, MODE_TAG, ONCE
from sr_assets.settings import Entry, Settings

import_in_process_run()


class SiteJob:
    """A site's job."""

    def __init__(self, settings: Settings, site: str) -> None:
        self._settings, self._entries = settings, settings.sites[site]
        self._job: Final[JobDefinition] = build_sites(settings, [site]).get_job_def(site_job_name(settings, site))

    def execute(self, run_id: str, entries: Sequence[Entry], *, once: bool) -> ExecuteInProcessResult | None:
        """Run the job for some entries of the site, as the run `run_id`.

        Without `once`, the run lingers; print an error of Dagster's storage, which may be back soon, and return None.
        """
        keys = (spec.key for entry in entries for spec in entry_assets(entry).specs(self._settings))
        try:
            with prepared_instance() as instance:
                return self._job.execute_in_process(
                    instance=instance,
                    asset_selection=None if len(entries) == len(self._entries) else [*keys],
                    tags={MODE_TAG: ONCE if once else LINGER},
                    raise_on_error=False,
                    run_id=run_id,
                )
        except RunError as error:
            if once:
                raise
            print_error(str(error))
            return None
