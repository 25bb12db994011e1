"""`make soak`: a fleet reports and a site runs while random faults hit all parts, in one home or in two.

At the end the faults and the fleet stop, and two last runs drain the streams. Then the target, the tables, the
advisories and the centre's view are compared with the source's history. Only messages that the source stored count.

It prints the seed and the counts. If any message is lost, duplicated or wrong, it exits with 1 and keeps the home.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

from sr_assets.operate.processes import INTERRUPTED, signals_as_interrupt
from sr_assets_bench.soak.one_home import soak_home
from sr_assets_bench.soak.two_members import soak_members
from sr_assets_bench.soak.verdict import MARK, Verdict, left_behind, say


def _soak(home: Path, arguments: argparse.Namespace) -> Verdict:
    seed, seconds, messages = arguments.seed, arguments.seconds, arguments.messages
    if arguments.members == 1:
        return soak_home(home, seed, seconds, messages)
    return soak_members(home, seed, seconds, messages, arguments.fail_overs)


def main() -> int:
    """Run a soak, print the results, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make soak", description="Kill everything at random; lose and double nothing."
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of the faults (default: 300)")
    parser.add_argument("--messages", type=int, default=0, help="minimum number of messages to read (default: 0)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: a random one"
    )
    parser.add_argument("--members", type=int, choices=(1, 2), default=1, help="homes of the site (default: 1)")
    parser.add_argument("--fail-overs", type=int, default=0, help="minimum number with two members (default: 0)")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    os.environ[MARK] = uuid.uuid4().hex
    home = Path(tempfile.mkdtemp(prefix="sr-assets-soak-")).resolve()
    say(f"seed {arguments.seed}, {arguments.seconds:g} s, in {home}")
    try:
        with signals_as_interrupt():
            verdict = _soak(home, arguments)
            verdict.complaints.extend(left_behind())
    except KeyboardInterrupt:
        shutil.rmtree(home)
        return INTERRUPTED
    for line in verdict.findings():
        say(line)
    for name, count in verdict.counts().items():
        text = ", ".join(f"{key} {number}" for key, number in count.items()) if isinstance(count, dict) else count
        say(f"{name.replace('_', ' ')}: {text}")
    if verdict.failed:
        say(f"all files are kept in {home}")
    else:
        shutil.rmtree(home)
    if arguments.json:
        sys.stdout.write(json.dumps(verdict.counts()) + "\n")
    return int(verdict.failed)


if __name__ == "__main__":
    sys.exit(main())
