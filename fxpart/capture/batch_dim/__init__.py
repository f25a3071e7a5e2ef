"""The batch dimension of each value of an ATen graph."""
