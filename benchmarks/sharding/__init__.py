"""Predictions for sharded models beside gloo processes that run them with torch's own APIs."""
