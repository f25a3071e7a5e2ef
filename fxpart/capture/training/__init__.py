"""Capture of a training step, including its backward, as one graph."""
