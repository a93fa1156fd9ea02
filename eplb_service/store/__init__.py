"""Where the planner keeps what must outlive it."""
