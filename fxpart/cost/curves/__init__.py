"""Kernel times by shape: a few coefficients for each kind, fitted to measured times."""
