"""Where the planner keeps what must outlive it; `open_store` in `store/open.py` is the way in.

This file imports nothing, so that the pure modules (`base`, `memory`, `refusals`, `address`) load without redis.
"""
