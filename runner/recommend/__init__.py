"""``python -m runner.recommend``: the best plan of a search space, each plan costed like a run."""
