"""Measure operator times on a device of this machine."""
