"""Tensors that lie in tiers beside the devices: what is offloaded, and how it then runs."""
