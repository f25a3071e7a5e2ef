"""Pipelines: a model cut into stages after named modules, and stages made ready for an engine."""
