"""Pipeline stages: cut a model after named modules, and prepare the stages for an engine."""
