"""``python -m runner.recommend``: the best plan of a space of plans, each costed as a run would."""
