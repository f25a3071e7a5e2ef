"""A space of plans, each costed as a run costs it, and the best of them."""
