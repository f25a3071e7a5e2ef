"""Searches of published placement problems, under their own cost model."""
