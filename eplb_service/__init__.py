"""Control plane that keeps Mixture-of-Experts fleets balanced.

The modules directly in this package (topology, placement, imbalance, …) and `eplb_service.policy` are pure: no asyncio,
grpc, redis, torch, clock or randomness of their own, numpy only. `store`, `rpc`, `cli` and `planner` are the shell around
them.
"""

__version__ = "0.2.0"
