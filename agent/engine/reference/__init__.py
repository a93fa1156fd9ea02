"""The reference engine: serves a small MoE with expert parallelism, the way large engines do, small enough to read.

config      what a fleet is                      launch      start rank processes, stop them
messages    what clients and ranks say           client      one client of one rank
model       what a model must offer              rank        main function of a rank process
scheduler   continuous batching (pure)           server      the loop of a rank
engine      one step                             dispatch    which replica takes a token
experts     slots and routing tables             exchange    rows to slots and back
port        `EnginePort` for the hook            wake        rousing idle ranks
front_door  clients of a rank                   group       the ranks that step together
orders      between launcher and ranks          survive     what a rank does when a step fails
coordinator when to form again, of whom         watch       runs the coordinator for a launcher
sources     experts that no rank holds
"""
