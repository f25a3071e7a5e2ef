"""Offloading of tensors to tiers outside the devices: what to offload, and how it then runs."""
