"""Options of vLLM that follow from how a plan computes prompts and products."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.plan_export.test_engines import SERVING, text_of


def test_a_pass_of_vllm_has_room_for_the_prompts_and_a_token_of_each_text() -> None:
    assert "max-num-batched-tokens" not in text_of(SERVING, "vLLM")
    in_turn = replace(SERVING, prefill_tokens=4096)
    assert "--max-num-batched-tokens 4096" in text_of(in_turn, "vLLM")
    many = replace(in_turn, prefill_tokens=16, batch_size=64)
    assert "--max-num-batched-tokens 64" in text_of(many, "vLLM")


def test_products_of_vllm_in_8_bits_are_named_where_they_are_not_planned() -> None:
    weights = replace(SERVING, weights="fp8")
    assert "weights.activations=fp8" in text_of(weights, "vLLM")
    assert "weights.activations" not in text_of(replace(weights, activations="fp8"), "vLLM")


def _run(script: str, tmp_path: Path, *arguments: str) -> list[str]:
    """Return the arguments that the script gives to vLLM."""
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (tmp_path / "vllm.sh").write_text(script)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", str(tmp_path / "vllm.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else [done.stderr]


def test_replicas_start_on_each_machine(tmp_path: Path) -> None:
    """Of eight replicas of a group of two, four are on each of two machines of eight devices."""
    plan = replace(SERVING, data_parallel=8, tensor_parallel=2, machines=2)
    assert plan.devices == 16
    script = text_of(plan, "vLLM")
    first = _run(script, tmp_path, "model", "10.0.0.1", "0")
    shared = ["--data-parallel-size-local", "4", "--data-parallel-address", "10.0.0.1"]
    assert first[:2] == ["serve", "model"]
    assert first[-6:] == [*shared, "--data-parallel-rpc-port", "13345"]
    second = _run(script, tmp_path, "model", "10.0.0.1", "1")
    assert second == [*first, "--headless", "--data-parallel-start-rank", "4"]
    assert "the number of this machine" in _run(script, tmp_path, "model", "10.0.0.1")[0]
    assert "others" not in text_of(replace(plan, machines=1), "vLLM")


def test_a_replica_over_several_machines_is_of_a_ray_cluster(tmp_path: Path) -> None:
    alone = replace(SERVING, tensor_parallel=4, machines=2)
    script = text_of(alone, "vLLM")
    assert "ray start --address=FIRST:6379" in script
    started = _run(script, tmp_path, "model")
    assert started[-2:] == ["--distributed-executor-backend", "ray"]
    script = text_of(replace(alone, data_parallel=3, machines=4), "vLLM")
    assert _run(script, tmp_path, "model")[-2:] == ["--data-parallel-backend", "ray"]
