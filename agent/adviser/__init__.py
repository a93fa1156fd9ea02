"""In engines that move their own weights: their load balancer asks the planner, through the node's agent process.

`entry` is what engines load by name. It imports nothing from an engine, and nothing else of this package, until it is switched
on by EPLB_ADVISER. Torch, numpy and the standard library only.
"""
