"""The planner's side of a rollout: a pure machine for one deployment under one epoch, and its parts."""
