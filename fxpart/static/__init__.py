"""The accounting of torch's partitioner, on arrays: static memory and critical-path latency.

Known to neither torch nor the runner. `fxpart.partitioner` fills these arrays from an `fx.Graph`
and carries out what is decided here; the modes of the runner (`fxpart.modes`) count liveness memory
and simulated latency instead.
"""
