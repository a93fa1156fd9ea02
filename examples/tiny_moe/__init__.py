"""A small byte-level Mixture-of-Experts language model, trained here, whose every token can be checked bit for bit."""
