"""Which dimension of each value of an ATen graph is the batch."""
