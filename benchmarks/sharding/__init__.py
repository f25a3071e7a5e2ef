"""Predictions for sharded models beside processes of gloo that run them on torch's own APIs."""
