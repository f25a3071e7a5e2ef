"""What goes with weights and caches of few bits, and why something does not."""

import numpy as np
import pytest

from fxpart.cost.roofline import LatencyModel
from fxpart.errors import NotApplicableError
from runner.experiment.experiment import model_spec, plan
from runner.experiment.serving import check_serving
from tests.runner.composed import read


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("phase=training", "int8 is planned for serving, and for frozen weights of finetune=lora"),
        ("data_parallel=2", "one replica, others serve texts of their own; leave out data_par"),
        ("tensor_parallel=2", "whole layers, whose scales are not split; leave out tensor_par"),
        ("latency=profiled", "a roofline, no kernels of few bits are measured; leave out latency="),
        ("execute=local", "drawn weights are of the model's dtype; leave out execute=local"),
    ],
)
def test_each_refusal_has_its_own_reason(other: str, why: str) -> None:
    with pytest.raises(NotApplicableError, match=why):
        check_serving(read("weights=int8", other))


def test_kernels_are_refused_for_caches_of_few_bits_alone() -> None:
    check_serving(read("weights=int8", "phase=decode", "latency=kernels"))
    with pytest.raises(
        NotApplicableError, match="kv_cache=fp8 is planned for a roofline, attention"
    ):
        check_serving(read("kv_cache=fp8", "phase=decode", "latency=kernels"))


def test_products_of_few_bits_are_the_rooflines_and_say_so() -> None:
    config = read(
        "model=gpt2",
        "model.config={n_layer:1,n_embd:64,n_head:2,vocab_size:128}",
        *("phase=decode", "context_len=16", "mode=single", "devices=1xa100_80gb", "weights=int8"),
        "latency=kernels",
    )
    result = plan(config, model_spec(config))
    problem = result.problem
    is_few = np.array([target.startswith("int8.") for target in problem.graph.targets])
    latency = config.latency
    roofline = LatencyModel(
        latency.compute_efficiency, latency.bandwidth_efficiency, latency.op_overhead_s
    )
    plain = roofline.op_time_s(problem.graph, problem.topology)[:, 0]
    times = problem.costs.op_time_s[:, 0]
    assert is_few.sum() == 4
    assert (times[is_few] == plain[is_few]).all()
    fused = [i for i, t in enumerate(problem.graph.targets) if "scaled_dot_product" in t]
    assert (times[fused] != plain[fused]).all()
    assert "a roofline for products of weights in int8" in result.times_note
