"""Dagster's definitions for many sites: CPU of loading them, and the size of their snapshot."""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from pathlib import Path

    from sr_assets_bench.rig import Bench

SITES: Final = (10, 100, 1_000)
_TRACKED: Final[dict[str, str]] = {"inspect_field": "sender", "inspect_duration": "1h"}


def measure_definitions(bench: Bench) -> dict[str, Any]:
    """Measure the definitions of sites with one tracked stream each, in a new process per number of sites."""
    figures: dict[str, Any] = {}
    for sites in SITES:
        entries = [
            {"name": f"site{n}", "stream": "NODES", "target_stream": f"NODES{n}", **_TRACKED} for n in range(sites)
        ]
        bench.settings(entries)
        context = get_context("spawn")
        results: Queue[dict[str, float]] = context.Queue()
        loading = context.Process(target=_load, args=(bench.file, results))
        loading.start()
        figures |= {f"{name}_{sites}": value for name, value in results.get().items()}
        loading.join()
    few, many = (figures[f"load_seconds_{sites}"] / sites for sites in SITES[1:])
    return {**figures, "many_to_some": round(many / few, 2)}


def _load(file: Path, results: Queue[dict[str, float]]) -> None:
    """Load the definitions of a file and create the code server's snapshot."""
    from sr_assets.definitions import build_sites, defs
    from sr_assets.settings import load_settings

    os.environ["SR_ASSETS_CONFIG"] = str(file)
    os.environ.pop("DAGSTER_HOME", None)
    started = time.process_time()
    repository = defs().get_repository_def()
    repository.get_all_jobs()
    loaded = time.process_time()
    build_sites(load_settings(file, {}), ["site3"]).get_repository_def().get_all_jobs()
    run_loaded = time.process_time()
    alone, with_jobs = snapshot_bytes(repository)
    snapped = time.process_time()
    results.put(
        {
            "load_seconds": round(loaded - started, 2),
            "load_for_a_run_seconds": round(run_loaded - loaded, 2),
            "snapshot_seconds": round(snapped - run_loaded, 2),
            "snapshot_mb": round(alone / 1e6, 2),
            "snapshot_with_jobs_mb": round(with_jobs / 1e6, 2),
        }
    )


def snapshot_bytes(repository: Any) -> tuple[int, int]:
    """Return the size of a repository's snapshot from the code server, and the size with the snapshots of all jobs.

    Dagster has no public API for it.
    """
    import warnings

    from dagster._core.remote_representation.external_data import RepositorySnap
    from dagster_shared.serdes import serialize_value

    with warnings.catch_warnings():
        # Dagster reads one of its own deprecated properties.
        warnings.simplefilter("ignore", DeprecationWarning)
        alone, with_jobs = (
            serialize_value(RepositorySnap.from_def(repository, defer_snapshots=deferred)) for deferred in (True, False)
        )
    return len(alone), len(with_jobs)
