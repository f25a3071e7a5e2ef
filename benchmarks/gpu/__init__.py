"""Measure models and constants on one GPU, to compare predictions with."""
