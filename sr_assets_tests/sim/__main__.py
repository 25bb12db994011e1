"""`make simulate`: run histories for some time, and print what they did and found."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

from sr_assets_tests.sim.elections import run_history, shrink
from sr_assets_tests.sim.history import Choice, Outcome
from sr_assets_tests.sim.platform import IN_MEMORY


def _run(seed: int, choice: Choice, failed: Outcome | None = None) -> Outcome:
    """Run the history of a seed, or shrink it if it has failed."""
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=IN_MEMORY) as folder:
        if failed is None:
            return run_history(seed, Path(folder), choice=choice)
        return shrink(failed, Path(folder), choice)


def _print(difference: str) -> None:
    print(difference, file=sys.stderr, flush=True)


def main() -> int:
    """Run seeds from `--seed` on until `--seconds` have passed, or `--histories` of them; return 1 for a difference."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to begin new histories (60)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--histories", type=int, default=1 << 40, help="how many histories at most")
    parser.add_argument("--members", type=int, choices=(1, 2, 3), default=0, help="only histories of so many members")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="a fault that may happen, such as lost"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    began, counts, problems = time.monotonic(), Outcome(options.seed), list[int]()
    choice, histories = Choice(options.members, frozenset(options.only)), 0
    workers = len(os.sched_getaffinity(0))
    seeds = iter(range(options.seed, options.seed + options.histories))
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(_run, seed, choice) for seed in itertools.islice(seeds, 2 * workers)}
        shrinking = set[Future[Outcome]]()
        while running or shrinking:
            done = next(as_completed(running | shrinking))
            outcome = done.result()
            if done in shrinking:
                shrinking.remove(done)
                _print(f"seed {outcome.seed}, as few faults as possible {outcome.effective}: {outcome.problem}")
                continue
            running.remove(done)
            histories += 1
            for name in ("faults", "points"):
                getattr(counts, name).update(getattr(outcome, name))
            counts.messages += outcome.messages
            counts.transitions += outcome.transitions
            if outcome.problem is not None:
                problems.append(outcome.seed)
                _print(f"seed {outcome.seed}: {outcome.problem}")
                shrinking.add(pool.submit(_run, outcome.seed, choice, outcome))
            if time.monotonic() - began < options.seconds and (seed := next(seeds, None)) is not None:
                running.add(pool.submit(_run, seed, choice))
    seconds = time.monotonic() - began
    result = {
        "histories": histories,
        "per_minute": round(histories / seconds * 60),
        "differences": problems,
        "messages": counts.messages,
        "transitions": counts.transitions,
        "faults": dict(sorted(counts.faults.items())),
        "points": dict(sorted(Counter({str(name): count for name, count in counts.points.items()}).items())),
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
