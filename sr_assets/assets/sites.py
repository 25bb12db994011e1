"""A site's assets as one computation: the stages of all its entries, which one run materialises together or in any
part.

Here: running them. Not here: which assets an entry has (`entries`), what a run records (`recording`), the run itself
(`stages.run`).

They are one computation because a run lingers: it takes batch after batch through all stages of all entries.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import dagster as dg

from sr_assets.assets.entries import entry_assets
from sr_assets.assets.fleet import published_tables
from sr_assets.assets.recording import Recorder, Result
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, cannot_write
from sr_assets.resources import HOSTED, LINGER, MISCONFIGURED, MODE_TAG, NOTED
from sr_assets.settings import Settings
from sr_assets.stages.report import StreamReport

if TYPE_CHECKING:
    from sr_assets.stages.run import SiteRun


class Hosting(Protocol):
    """The resource `hosting`: what else the process of a run does while the run lingers."""

    @property
    def sites(self) -> int:
        """How many sites the process serves."""

    @property
    def keep_running(self) -> bool:
        """Whether the run is to go on for other sites, though there is nothing to do for its own."""

    @property
    def stopping(self) -> bool:
        """Whether the run is to end."""

    def open(self, context: dg.AssetExecutionContext) -> AbstractContextManager[None]:
        """Serve other sites too, until the end of `with`."""


def build_site_assets(settings: Settings, name: str) -> dg.AssetsDefinition:
    """Return a site's assets with their checks; needs the resources `platform` and `hosting` (a `Hosting`).

    Its runs record the shared tables too, which they publish. Those are no assets of the site's job: they depend on every
    site's, so that each job, and each run of it, would carry all sites.
    """
    entries = {entry.stream: entry_assets(entry) for entry in settings.sites[name]}
    group = settings.sites[name][0].asset_prefix[0]

    @dg.multi_asset(
        name=f"{group}_site",
        specs=[spec for assets in entries.values() for spec in assets.specs(settings)],
        check_specs=[spec for assets in entries.values() for spec in assets.check_specs()],
        can_subset=True,
        required_resource_keys={"platform", "hosting"},
    )
    def site_assets(context: dg.AssetExecutionContext) -> Iterator[Result]:
        # Spark's client is loaded by the run, so that loading the definitions stays quick.
        from sr_assets.stages.run import SiteRun

        platform, mode = context.resources.platform, context.run.tags.get(MODE_TAG)
        hosting: Hosting = context.resources.hosting
        stages = {stream: assets.selected_stages(context.selected_asset_keys) for stream, assets in entries.items()}
        selection = {stream: chosen for stream, chosen in stages.items() if chosen}
        with (
            _one_line_failures(platform.settings.home),
            platform.open_site(name, context.run.run_id, mode, lambda: hosting.sites) as site,
            hosting.open(context),
        ):
            lingers = mode in (LINGER, HOSTED)
            run = SiteRun(site, selection, drain_only=not lingers, wanted=lambda: hosting.keep_running)
            recorder = Recorder(site, entries, context)
            with closing(run.rounds()) as rounds:
                for caught_up in rounds:
                    if hosting.stopping:
                        break
                    if lingers and recorder.due(caught_up=caught_up):
                        yield from _so_far(run, recorder, platform.settings)
            results, numbers = list(recorder.record(run.reports, ended=True)), recorder.numbers(run.reports)
        yield from results
        yield from published_tables(platform.settings)
        _raise_failures(run.reports, numbers)

    return site_assets


def _so_far(run: "SiteRun", recorder: Recorder, settings: Settings) -> Iterator[Result]:
    """Record a run that goes on; the shared tables once."""
    if not recorder.began:
        yield from published_tables(settings)
    yield from recorder.record(run.reports_so_far(), ended=False)


@contextmanager
def _one_line_failures(home: Path) -> Iterator[None]:
    """Turn what stops a whole run into a failure of one line."""
    try:
        yield
    except SrAssetsError as error:
        raise _failure([str(error)], {}, misconfigured=isinstance(error, ConfigurationError)) from None
    except OSError as error:
        raise _failure([cannot_write(error.filename or home, error)], {}, misconfigured=False) from None


def _raise_failures(reports: Mapping[str, StreamReport], numbers: Mapping[str, Mapping[str, Any]]) -> None:
    failures = [report.failure for report in reports.values() if report.failure]
    if failures:
        misconfigured = any(report.misconfigured for report in reports.values())
        raise _failure(failures, numbers, misconfigured=misconfigured, noted=True)


def _failure(
    lines: Sequence[str], numbers: Mapping[str, Mapping[str, Any]], *, misconfigured: bool, noted: bool = False
) -> dg.Failure:
    """Return how a run fails: a line for each stream, what was done all the same, and whether to change the configuration."""
    done = {label: dg.MetadataValue.json(values) for label, values in numbers.items()}
    return dg.Failure(
        "\n".join(lines), metadata={MISCONFIGURED: misconfigured, NOTED: noted, **done}, allow_retries=False
    )
