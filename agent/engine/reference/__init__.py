"""The reference engine: serves a small MoE with expert parallelism, the way large engines do, small enough to read.

config      what a fleet is                      launch      start rank processes, stop them
messages    what clients and ranks say           client      one client of one rank
model       what a model must offer              rank        main function of a rank process
scheduler   continuous batching (pure)           server      the loop of a rank
engine      one step                             dispatch    which replica takes a token
experts     slots and routing tables             exchange    rows to slots and back
port        `EnginePort` for the hook            wake        rousing idle ranks
front_door  clients of a rank
"""
