"""Load windows: what ranks report, which reports are believed, and their sums. Pure."""
