"""Placement policies: pure functions from a planning problem to a proposal, and the check that every proposal must pass."""
