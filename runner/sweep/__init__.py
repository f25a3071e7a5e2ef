"""Sweeps: compose their jobs, run those without a result, here or elsewhere, and sum up."""
