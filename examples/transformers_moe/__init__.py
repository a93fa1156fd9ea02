"""A Mixture-of-Experts model of transformers, served over ranks with the hook in it."""
