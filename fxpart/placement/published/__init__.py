"""Searches for published placement problems, under their own cost model."""
