"""`python -m eplb_service` is the `eplb` command."""

from eplb_service.cli import main

main()
