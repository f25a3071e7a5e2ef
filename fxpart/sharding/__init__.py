"""Sharding over a group of devices: the local part of a model, and the group's collectives."""
