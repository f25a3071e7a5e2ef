"""Launchers: the jobs of a sweep in other processes than the sweep's own."""
