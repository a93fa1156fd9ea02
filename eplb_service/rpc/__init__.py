"""The wire: protobuf to and from our own values, channels, and errors as gRPC statuses. Used by planner, agent and CLI."""
