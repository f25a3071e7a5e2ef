"""Measure how long operators take on a device of this machine."""
