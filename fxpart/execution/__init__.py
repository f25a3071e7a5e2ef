"""Placed models really run on this machine: what was predicted can be held against it.

`fxpart.execution.local` runs one in this process, `fxpart.execution.pipeline_run` in one process a
stage. Nothing is imported here: the processes of stages start sooner for it.
"""
