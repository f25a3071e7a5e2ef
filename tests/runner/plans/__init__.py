"""Tests of `runner.plans`."""
