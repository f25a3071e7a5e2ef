"""The accounting of torch's partitioner, on arrays: static memory and critical-path latency.

Known to neither torch nor the runner. `fxpart.torch_compat.partitioner` fills these arrays from an
`fx.Graph` and carries out what is decided here; the modes of the runner (`fxpart.placement`) count
liveness memory and simulated latency instead.
"""
