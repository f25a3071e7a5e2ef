"""Launchers: run the jobs of a sweep in other processes."""
