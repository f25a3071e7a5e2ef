"""Tracking of runs: the interface of trackers, the MLflow tracker, and one that stores nothing."""
