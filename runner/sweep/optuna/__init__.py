"""The search with Optuna."""
