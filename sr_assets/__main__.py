"""`python -m sr_assets` is the `sr-assets` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `-m` puts the current folder in front, where anybody may have left a module by the name of one that we import.
        del sys.path[0]
    from sr_assets.cli import main

    main()
