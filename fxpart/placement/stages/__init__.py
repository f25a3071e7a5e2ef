"""Searches for a cut of a model into pipeline stages."""
