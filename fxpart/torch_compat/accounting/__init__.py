"""The accounting of torch's partitioner, on arrays: static memory and critical-path latency.

Independent of torch and of the runner. `fxpart.torch_compat.partitioner` fills these arrays from an
`fx.Graph` and applies the plans made here; the runner's modes (`fxpart.placement`) use liveness
memory and simulated latency instead.
"""
