"""The inputs of one step of a pipeline: as many microbatches as it takes, of equal shapes."""

import torch

from fxpart.execution.real_model import RealModel
from fxpart.execution.seeded import seeded
from fxpart.models.random_inputs import drawn_inputs
from fxpart.models.spec import ModelSpec
from fxpart.pipeline.chain import Chain

__all__ = ["drawn_microbatches"]


def drawn_microbatches(
    spec: ModelSpec, real: RealModel, chain: Chain, count: int, seed: int = 0
) -> list[tuple[torch.Tensor, ...]]:
    """Return what stage 0 of `chain` takes for `count` microbatches of `real`, made from `spec`.

    The first holds the inputs of `real`, the others are drawn anew, each from a seed of its own.
    What a factory returned as inputs is given again each time: only it knows what is valid.
    """
    calls = [real.kwargs]
    for index in range(1, count):
        if spec.architecture is None:
            calls.append(real.kwargs)
            continue
        with seeded(seed + index, real.device):
            calls.append(drawn_inputs(real.module, real.kwargs, real.device))
    return [chain.flat_inputs(real.args, kwargs) for kwargs in calls]
