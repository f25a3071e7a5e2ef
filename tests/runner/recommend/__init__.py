"""Tests of `runner.recommend`."""
