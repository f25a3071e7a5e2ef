"""What limits the time of a plan."""

import pytest

from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.plans.bottleneck import limit_of, time_shares
from tests.runner.composed import TINY_LLAMA, read


def _shares(*overrides: str, streams: bool = True) -> dict[str, float]:
    config = read(*TINY_LLAMA, "capture.use_cache=false", *overrides)
    result = plan(config, model_spec(config))
    shares = time_shares(config, result, streams=streams)
    assert sum(shares.values()) == pytest.approx(1.0)
    return shares


def test_a_slow_host_limits_a_stream_of_small_operators() -> None:
    shares = _shares("mode=pipeline", "devices=2x16gb", "runtime.host_launch_s=0.01")
    assert shares["host"] > 0.9
    assert limit_of(shares, 1).startswith("host ")
    assert _shares("mode=single", "devices=1x16gb", "runtime.host_launch_s=0")["host"] == 0.0


def test_slow_links_limit_split_plans() -> None:
    split = ("mode=single", "devices=2x16gb", "tensor_parallel=2", "runtime.host_launch_s=0")
    assert _shares(*split, "transfer_rate.bytes_per_s=1e4", streams=False)["links"] > 0.9
    assert _shares(*split, "transfer_rate.bytes_per_s=1e15", "transfer_rate.latency_s=0")[
        "links"
    ] == pytest.approx(0.0, abs=0.01)


def test_what_limits_depends_on_the_shares_of_the_device() -> None:
    plain = ("mode=single", "devices=1x16gb", "runtime.host_launch_s=0", "latency=roofline")
    stated = "++devices.pools.0.efficiency={gemm: {bfloat16: 1e-4, float16: 1e-4}}"
    assert _shares(*plain, stated)["compute"] > 0.5 > _shares(*plain)["compute"]
    assert _shares(*plain, stated, "latency.compute_efficiency=0.7") == _shares(*plain)


def test_updates_count_once_per_step() -> None:
    slow = ("latency.compute_efficiency=1e-3", "mode=single", "devices=1x16gb")
    step = (*slow, "phase=training", "runtime.host_launch_s=0")
    config = read(*TINY_LLAMA, "capture.use_cache=false", *step)
    latency_s = plan(config, model_spec(config)).evaluation.latency_s
    config = read(*TINY_LLAMA, "capture.use_cache=false", *step, "schedule=1f1b", "microbatches=8")
    schedule = plan(config, model_spec(config)).schedule
    assert schedule is not None
    assert schedule.step_s < 0.95 * 8 * latency_s  # since updates take their time
    once = _shares(*step, streams=False)["compute"] * latency_s
    shares = _shares(*step, "schedule=1f1b", "microbatches=8", streams=False)
    assert 0.05 < shares["compute"] == pytest.approx(8 * once / schedule.step_s)


@pytest.mark.parametrize("streams", [False, True])
def test_copies_of_weights_count_as_waiting_for_links(streams: bool) -> None:
    tiers = ("mode=size_based", "devices=1x0.15mb+host1gb", "offload=prefetch", "phase=decode")
    slow = ("context_len=16", "runtime.host_launch_s=0", "transfer_rate=1e6")
    shares = _shares(*tiers, *slow, streams=streams)
    assert shares["links"] > 0.9
    assert shares["host"] == 0.0


def test_the_largest_shares_are_named() -> None:
    shares = {"compute": 0.5, "memory": 0.3, "links": 0.17, "host": 0.03}
    assert limit_of(shares) == "compute 50%, memory 30%, links 17%"
    assert limit_of(shares, 1) == "compute 50%"
