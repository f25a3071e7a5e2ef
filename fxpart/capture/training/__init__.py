"""A training step, backward included, as one graph."""
