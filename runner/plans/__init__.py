"""Search a space of plans, each costed like a run, for the best."""
