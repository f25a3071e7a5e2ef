"""Search with Optuna: the next jobs are proposed from the results so far."""
