"""`python -m sr_assets.operate SITE`: run one site, as the child process of `run_sites`."""

import argparse
import sys

from sr_assets.operate.site import site_process

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="sr_assets.operate")
    parser.add_argument("site")
    parser.add_argument("--mode", choices=("once", "follow"), default="once")
    parser.add_argument("--stream", action="append", default=[])
    parser.add_argument("--bars", action="store_true")
    arguments = parser.parse_args()
    sys.exit(site_process(arguments.site, arguments.stream, once=arguments.mode == "once", bars=arguments.bars))
