"""`bench --against REF`: the same workloads on this tree and on another commit, alternately, as ratios."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_ROOT: Final = Path(__file__).parent.parent
_Figures = dict[tuple[str, str], list[float]]


def compare_commits(console: Console, ref: str, workloads: Sequence[str], scale: float, rounds: int) -> dict[str, Any]:
    """Measure each workload `rounds` times on both trees, alternately; print and return the medians and their ratio."""
    here: _Figures = defaultdict(list)
    there: _Figures = defaultdict(list)
    with _worktree(ref) as other:
        for workload in workloads:
            for number in range(rounds):
                # The first of a pair finds a colder machine, so the order changes.
                pair = ((_ROOT, here), (other, there))
                for tree, figures in pair if number % 2 else pair[::-1]:
                    for figure, value in _measure(tree, workload, scale).items():
                        figures[workload, figure].append(value)
                console.print(f"{workload}: round {number + 1} of {rounds}", highlight=False)
    return _show(console, ref, here, there)


@contextmanager
def _worktree(ref: str) -> Iterator[Path]:
    """Check a commit out into a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="bench-against-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, ref], cwd=_ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=_ROOT, check=True)


def _measure(tree: Path, workload: str, scale: float) -> dict[str, float]:
    """Run one workload of a tree with this Python, and return its numeric figures."""
    command = [sys.executable, "-m", "sr_assets_bench", "--only", workload, "--scale", str(scale)]
    # The tree precedes the installed package, in child processes too.
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])[workload]
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def _show(console: Console, ref: str, here: _Figures, there: _Figures) -> dict[str, Any]:
    table = Table("workload", "figure", "here", ref, "ratio")
    compared: dict[str, Any] = defaultdict(dict)
    for key in (key for key in here if key in there):
        ours, theirs = statistics.median(here[key]), statistics.median(there[key])
        ratio = round(ours / theirs, 3) if theirs else None
        table.add_row(*key, f"{ours:,g}", f"{theirs:,g}", "-" if ratio is None else f"{ratio:.2f}")
        compared[key[0]][key[1]] = {"here": ours, "there": theirs, "ratio": ratio}
    console.print(table)
    return compared
