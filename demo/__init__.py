"""The demo: serve a real MoE with expert parallelism on this machine, rebalance it live, and prove that nothing broke.

It uses the product as a user would: planner and agent processes are started through the `eplb` command, everything else
goes through gRPC. It runs from a checkout of the repository.
"""
