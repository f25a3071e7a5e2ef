"""Search with Optuna, which proposes jobs from the results so far."""
