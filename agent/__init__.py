"""The agent: a hook inside the engine process (`agent.hook`, torch + numpy + standard library) and an agent process."""
