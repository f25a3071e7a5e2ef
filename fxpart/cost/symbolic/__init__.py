"""Sizes and costs as polynomials of the batch size, from one capture."""
