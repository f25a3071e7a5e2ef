"""Run placed models on this machine, to compare measurements with predictions.

`fxpart.execution.local` runs a model in this process, `fxpart.execution.pipeline_run` in one
process per stage. Nothing is imported here, so that stage processes start sooner.
"""
