"""The accounting of torch's partitioner, on arrays: static memory and critical-path latency.

Independent of torch and of the runner. `fxpart.torch_compat.partitioner` builds these arrays from
an `fx.Graph` and applies the resulting plans; the runner's modes (`fxpart.placement`) use live
memory and simulated latency instead.
"""
