"""The part of the agent that lives in the engine process. Imports torch, numpy, the standard library and the pure modules only."""
