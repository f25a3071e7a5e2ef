"""Pipelines under the names of slapo: cut points, liveness, tied weights and engines."""
