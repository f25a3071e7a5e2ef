"""Engine files agree with their plan, and the benchmark detects where they do not."""

from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.recommend_files import Expected, file_faults
from fxpart.plan_export.engines import EnginePlan, engine_files
from tests.plan_export.test_engines import LLAMA, MEGATRON, PIPELINE, SERVING, SHARDED, TRAINING


def _asked(plan: EnginePlan, devices: int = 0) -> Expected:
    examples = plan.batch_size * plan.data_parallel * plan.microbatches
    return Expected(devices or plan.devices, examples, plan.model)


def _faults(folder: Path, plan: EnginePlan, expected: Expected) -> dict[str, list[str]]:
    for path in folder.iterdir():
        path.unlink()
    for engine, text in engine_files(plan).texts.items():
        (folder / engine.file).write_text(text)
    return file_faults(folder, expected)


def test_degrees_layers_and_batches_agree_with_the_plan(tmp_path: Path) -> None:
    seen = set()
    for plan, data, tensor in product(
        (SHARDED, PIPELINE, SERVING, MEGATRON, replace(SERVING, stages=PIPELINE.stages), TRAINING),
        (1, 2, 8),
        (1, 4),
    ):
        split = tensor > 1 and plan.training
        step = replace(plan, data_parallel=data, tensor_parallel=tensor, sequence_parallel=split)
        faults = _faults(tmp_path, step, _asked(step))
        assert not any(faults.values()), (step, faults)
        seen |= set(faults)
        wrong = _faults(tmp_path, step, _asked(step, 7))
        assert all(wrong[name] for name in wrong if name != "deepspeed.json")
    assert seen == {
        "torchtitan.toml",
        "accelerate.yaml",
        "deepspeed.json",
        "megatron_args.txt",
        "vllm.sh",
        "llama_cpp.sh",
    }


def test_disagreements_with_the_plan_are_named(tmp_path: Path) -> None:
    plan = replace(SHARDED, microbatches=2, schedule="1f1b")
    expected = _asked(plan)
    faults = _faults(tmp_path, plan, replace(expected, examples=3))
    assert sorted(faults) == ["deepspeed.json", "torchtitan.toml"]
    assert all(faults.values())
    odd = replace(expected, model={**LLAMA, "num_attention_heads": 3, "num_hidden_layers": 31})
    serving = replace(SERVING, stages=PIPELINE.stages, tensor_parallel=2)
    of_files = _faults(tmp_path, serving, replace(odd, devices=6, examples=4))
    assert of_files["vllm.sh"] == ["heads: 1 for 0", "layers: 32 for 31"]
