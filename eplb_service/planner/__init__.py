"""The planner's shell: runs what the pure machines decide, for every deployment."""
