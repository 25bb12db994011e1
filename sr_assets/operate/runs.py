"""The runs of `sr-assets run`: every site in a child process of its own, side by side.

A child is `python -m sr_assets.operate SITE` and does what `site` says.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sr_assets.operate.instance import mark_start, prepare_instance, prepare_storage
from sr_assets.operate.processes import INTERRUPTED, signals_as_interrupt, start_leashed, stop_groups

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from sr_assets.settings import Entry, Settings


def run_sites(settings: Settings, streams: Sequence[Entry], *, once: bool) -> int:
    """Run each site that has one of the streams, in processes side by side, as many as there are cores; returns the exit code.

    0; 1 when a stream failed, the others ran all the same; 2 when a site found its configuration wrong. Ctrl-C and SIGTERM
    end the sites in order: their batches under way are done again by the next run.
    """
    folder = prepare_instance(settings)
    mark_start()
    prepare_storage(folder)
    sites = list(dict.fromkeys(stream.name for stream in streams))
    chosen = {site: [stream.label for stream in streams if stream.name == site] for site in sites}
    crew = _Crew()
    with (
        signals_as_interrupt(),
        ThreadPoolExecutor(len(sites) if not once else min(len(sites), os.cpu_count() or 1)) as pool,
    ):
        working = [pool.submit(crew.work, site, chosen[site], once) for site in sites]
        try:
            codes = [future.result() for future in working]
        except KeyboardInterrupt:
            crew.dismiss()
            return INTERRUPTED if once else 0
    return _worst(codes)


def _worst(codes: Sequence[int]) -> int:
    return 2 if 2 in codes else int(any(codes))


class _Crew:
    """The child processes of a `run`, one for each site, until they are dismissed."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._dismissed = False

    def work(self, site: str, labels: Sequence[str], once: bool) -> int:
        """Let a child work a site and return its exit code; after a dismissal nobody begins."""
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "sr_assets.operate",
            site,
            "--mode",
            "once" if once else "follow",
        ]
        for label in labels:
            command += ["--stream", label]
        with self._guard:
            if self._dismissed:
                return 0
            child = start_leashed(command)
            self._children.append(child)
        with child:
            return child.wait()

    def dismiss(self) -> None:
        """Stop all children and let no other begin."""
        with self._guard:
            self._dismissed = True
        stop_groups(self._children)
