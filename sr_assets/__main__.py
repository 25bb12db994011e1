"""`python -m sr_assets` is the `sr-assets` command."""

from sr_assets.cli import main

if __name__ == "__main__":
    main()
