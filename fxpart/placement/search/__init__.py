"""Searches for a placement of operators that may go anywhere."""
