"""Partition a PyTorch model over devices, and predict whether it fits and how fast it runs.

The library depends on neither Hydra nor MLflow. A model is captured (`fxpart.capture`) as an
`OpGraph`; together with a `Topology` it forms a `Problem`; a mode (`fxpart.placement`) solves it
for an `Assignment`; `evaluate` predicts the cost of that, and `fxpart.schedule` simulates a
pipeline over microbatches.

Only some packages import torch: `fxpart.capture` and `fxpart.capture.models` build graphs;
`fxpart.execution.split` and `fxpart.execution.stages` split a module according to an assignment;
`fxpart.execution` runs it and `fxpart.execution.profiling` times its operators;
`fxpart.torch_compat.memory` and `fxpart.capture.batch_dim` track memory and the batch dimension
through torch graphs; `fxpart.torch_compat.partitioner` is a drop-in replacement for torch's own
partitioner. `fxpart.plan_export` writes plans for other tools.

The public names are listed in ``__init__.pyi`` and imported on first use, so that importing a
single error class stays cheap.
"""

from fxpart.support.lazy_import import attach_stub

__getattr__, __all__ = attach_stub(__name__, __file__)
