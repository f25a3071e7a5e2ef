"""Sweeps: which jobs there are, which of them are missing, running them, and what came of them."""
