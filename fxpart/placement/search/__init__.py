"""Searches for unrestricted placements of operators."""
