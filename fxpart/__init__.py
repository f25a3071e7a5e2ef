"""Cut a PyTorch model over devices, and predict whether it fits and how fast it will be.

The library knows neither Hydra nor MLflow. Its flow: a model is captured (`fxpart.capture`) as an
`OpGraph`; with a `Topology` it is a `Problem`; a mode (`fxpart.placement`) makes an `Assignment` of
it; `evaluate` predicts its cost, and `fxpart.schedule` simulates a pipeline over micro-batches.

What needs torch is in rooms of its own: `fxpart.capture` and `fxpart.capture.models` make graphs;
`fxpart.execution.split` and `fxpart.execution.stages` cut a module as it was decided;
`fxpart.execution` runs it and `fxpart.execution.profiling` measures its operators;
`fxpart.torch_compat.memory` and `fxpart.capture.batch_dim` follow the bytes and the batch through
graphs of torch; `fxpart.torch_compat.partitioner` replaces torch's own partitioner under torch's
names. `fxpart.plan_export` writes a plan for other tools.

The public names stand in ``__init__.pyi``. Each is imported when it is first used, so that
importing one error class stays cheap.
"""

from fxpart.support.lazy_import import attach_stub

__getattr__, __all__ = attach_stub(__name__, __file__)
