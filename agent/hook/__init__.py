"""The part of the agent that lives in the engine process: torch, numpy, standard library and pure modules only."""
