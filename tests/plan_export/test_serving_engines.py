"""Scripts of engines for serving, run with a program that records how it was called."""

import re
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxpart.errors import SpecError
from fxpart.plan_export.engines import ENGINES, Stages, engine_files, hosted_stages_of
from fxpart.plan_export.engines.architectures import VLLM, VLLM_WITHOUT_BITSANDBYTES
from tests.plan_export.test_engines import SERVING, run_script, text_of
from tests.sketch import Sketch


def test_vllm_is_called_with_the_layers_of_each_stage(tmp_path: Path) -> None:
    plan = replace(SERVING, stages=Stages((11, 11, 10), (2, 0, 1)), cache="fp8")
    plan = replace(plan, weights="nf4", group_size=64)
    arguments, variables = run_script(text_of(plan, "vLLM"), "vllm", tmp_path)
    assert arguments[:2] == ["serve", "a model"]
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert options["--pipeline-parallel-size"] == "3"
    assert options["--tensor-parallel-size"] == "1"
    assert options["--max-model-len"] == "2048"
    assert options["--max-num-seqs"] == "4"
    assert options["--quantization"] == "bitsandbytes"
    assert options["--kv-cache-dtype"] == "fp8"
    assert variables["VLLM_PP_LAYER_PARTITION"] == "11,11,10"
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,0,1"
    tensor = replace(SERVING, tensor_parallel=4)
    arguments, variables = run_script(text_of(tensor, "vLLM"), "vllm", tmp_path)
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in variables


def test_serving_engines_refuse_several_stages_on_a_device() -> None:
    files = engine_files(replace(SERVING, stages=Stages((8, 8, 8, 8), (0, 1, 0, 1))))
    assert not files.texts
    assert {engine.name for engine in files.refusals} >= {"vLLM", "llama.cpp"}
    assert set(files.refusals.values()) == {"it gives each stage a device of its own"}


@pytest.mark.parametrize(
    ("needed", "free", "given"),
    [(0.0, 1.0, 0.9), (0.5, 0.98, 0.9), (0.93, 0.98, 0.93), (0.9758, 0.97763, 0.9776)],
)
def test_vllm_is_given_the_memory_of_the_plan(needed: float, free: float, given: float) -> None:
    """But no more than is free beside its context, which it checks when it starts."""
    text = text_of(replace(SERVING, needed_share=needed, free_share=free), "vLLM")
    assert f"--gpu-memory-utilization {given} " in text
    assert ("--enforce-eager" in text) is (given > 0.9)


def test_a_small_device_gives_vllm_what_its_context_leaves() -> None:
    text = text_of(replace(SERVING, needed_share=0.7, free_share=0.866), "vLLM")
    assert "--gpu-memory-utilization 0.866 " in text


def test_quantized_checkpoints_are_named_with_their_groups() -> None:
    words = "awq in groups of 128 except lm_head"
    plan = replace(SERVING, weights="awq", group_size=128, format_text=words)
    assert f"# planned with weights in {words}: MODEL must be" in text_of(plan, "vLLM")


def test_a_format_that_is_not_the_usual_one_is_no_quantization_on_loading() -> None:
    plan = replace(SERVING, weights="nf4", group_size=64)
    assert "--quantization bitsandbytes" in text_of(plan, "vLLM")
    files = engine_files(replace(plan, has_shipped_format=False))
    assert "all modules in the same way" in next(
        why for engine, why in files.refusals.items() if engine.name == "vLLM"
    )


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Mamba2ForCausalLM"])
def test_models_that_vllm_cannot_load_with_bitsandbytes_are_refused(name: str) -> None:
    plan = replace(SERVING, architecture=name, weights="nf4", group_size=64)
    refusals = {engine.name: why for engine, why in engine_files(plan).refusals.items()}
    assert refusals["vLLM"] == (
        f"its loader for bitsandbytes, which nf4 needs, does not support {name}"
    )
    assert text_of(replace(plan, weights="fp8", group_size=0), "vLLM")
    assert VLLM_WITHOUT_BITSANDBYTES < VLLM


def test_the_plugin_for_bitsandbytes_is_named() -> None:
    text = text_of(replace(SERVING, weights="nf4", group_size=64), "vLLM")
    assert "pip install vllm-bnb-plugin" in text


def test_serving_engines_have_the_language_models_that_are_shipped() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    files = (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml")
    shipped = {
        name
        for path in files
        for name in re.findall(
            r"^architecture: (\w+(?:ForCausalLM|LMHeadModel))", path.read_text(), re.M
        )
    }
    assert len(shipped) >= 8
    for engine in ENGINES:
        if engine.models is not None:
            assert shipped <= engine.models
            assert engine.models <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    opt = engine_files(replace(SERVING, architecture="OPTForCausalLM"))
    assert [engine.name for engine in opt.texts] == ["vLLM"]


@pytest.mark.parametrize("layers", [(32,), (1, 31), (11, 10, 11), (7, 9, 8, 8), (3, 5, 4, 6, 14)])
def test_llama_cpp_puts_every_layer_on_its_planned_device(
    layers: tuple[int, ...], tmp_path: Path
) -> None:
    plan = replace(SERVING, stages=Stages(layers, tuple(range(len(layers)))))
    arguments, _ = run_script(text_of(plan, "llama.cpp"), "llama-server", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options["--model"] == "a model"
    assert options["--ctx-size"] == "8192"
    if len(layers) == 1:
        assert "--tensor-split" not in options
        return
    # As in llama_model::load_tensors: the first point above the share of the layers so far.
    split = np.array(options["--tensor-split"].split(","), dtype=np.float32)
    points = (np.cumsum(split) / split.sum()).tolist()
    of_layer = [
        bisect_right(points, float(np.float32(layer) / np.float32(33))) for layer in range(33)
    ]
    assert np.bincount(of_layer[:-1]).tolist() == list(layers)
    assert of_layer[-1] == len(layers) - 1  # the output


@pytest.mark.parametrize("hosts_output", [False, True])
@pytest.mark.parametrize(("layers", "hosted"), [((4,), 28), ((3, 5), 24), ((1, 1, 2), 0)])
def test_llama_cpp_leaves_the_first_layers_to_the_host(
    layers: tuple[int, ...], hosted: int, hosts_output: bool, tmp_path: Path
) -> None:
    stages = Stages(layers, tuple(range(len(layers))), tuple(range(hosted)), hosts_output)
    files = engine_files(replace(SERVING, stages=stages))
    text = text_of(replace(SERVING, stages=stages), "llama.cpp")
    assert (len(files.texts) == 1) is (hosted > 0 or hosts_output)
    arguments, _ = run_script(text, "llama-server", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    of_output = options.get("--override-tensor", "")
    assert bool(of_output) is hosts_output
    if hosts_output:
        pattern, _, place = of_output.partition("=")
        assert place == "CPU"
        assert [
            name
            for name in ("output.weight", "token_embd.weight", "blk.3.attn_output.weight")
            if re.search(pattern, name)
        ] == ["output.weight", "token_embd.weight"]
    if not hosted:
        return
    # As in llama_model::load_tensors: the last ones are on devices, and the output is one of them.
    count, n_layer = int(options["--n-gpu-layers"]), sum(layers) + hosted
    assert n_layer + 1 - count == hosted
    split = np.array(options.get("--tensor-split", "1").split(","), dtype=np.float32)
    points = (np.cumsum(split) / split.sum()).tolist()
    of_layer = [bisect_right(points, float(np.float32(layer) / count)) for layer in range(count)]
    assert np.bincount(of_layer[:-1]).tolist() == list(layers)
    assert of_layer[-1] == len(layers) - 1


def test_llama_cpp_is_told_which_layers_were_planned_on_the_host() -> None:
    stages = Stages((2,), (0,), hosted=(1, 3))
    text = text_of(replace(SERVING, stages=stages), "llama.cpp")
    assert "# the plan computes layers 1, 3 on the host; llama.cpp takes its first\n" in text


def test_hosted_layers_are_counted_in_whole_layers() -> None:
    sketch = Sketch()
    modules = ("embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head")
    value = sketch.input(1)
    for module in modules:
        value = sketch.op([value], 1, [sketch.weight(1)], module=module)
    graph = sketch.graph(value)

    def stages(*device_of: int) -> Stages:
        return hosted_stages_of(graph, np.array(device_of))

    assert stages(-1, -1, -1, 1, 1, 1) == Stages((1,), (1,), hosted=(0,))
    assert stages(0, 1, 1, 0, 0, -1) == Stages((1, 1), (1, 0), hosts_output=True)
    with pytest.raises(SpecError, match=r"layers\.1 is divided"):
        stages(-1, -1, -1, -1, 0, 0)
    with pytest.raises(SpecError, match="no layer is on a device"):
        stages(0, -1, -1, -1, -1, 0)
