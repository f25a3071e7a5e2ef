"""Searches for cuts of a model into pipeline stages."""
