"""Capture a forward pass as a graph: exported by operator, or traced by module."""
