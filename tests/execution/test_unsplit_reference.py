"""The reference of a pipeline: the user's own module, and all of its stages in turn."""

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.execution.real_model import real_model
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.stages.chain import chain_stages
from fxpart.execution.unsplit_reference import refuse_another_model


def test_stages_and_model_of_a_cached_step_get_the_same_cache() -> None:
    """Both write the token's keys and values to it, and count on; a second token does not fit."""
    config = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16, "n_positions": 8}
    spec = ModelSpec(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        config=config,
        step="decode",
        cache_len=8,
    )
    real = real_model(spec)
    before = [tensor.clone() for tensor in pytree.tree_leaves((real.args, real.kwargs))]
    stage_of = np.repeat([0, 1], [real.graph.n_ops // 2, real.graph.n_ops - real.graph.n_ops // 2])
    halves = Assignment(stage_of, ((0,), (1,)))
    chain = chain_stages(split_by_assignment(real.program.module(), real.graph, halves))
    refuse_another_model(chain, real, training=False, threads=1)
    after = pytree.tree_leaves((real.args, real.kwargs))
    assert all(map(torch.equal, after, before))
