"""The wire: protobuf to and from our own values, channels, and errors as gRPC statuses. Used by planner, agent and CLI."""

import os

# gRPC's core writes lines of its own to stderr (every GOAWAY, every failed handshake) beside ours that say the same in a
# sentence. It reads this when it is first imported; who wants its lines sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
