"""Runs the `eplb` command of this checkout with the tests' interpreter."""

from eplb_service.cli import main

if __name__ == "__main__":
    main()
