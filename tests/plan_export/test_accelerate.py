"""Accelerate accepts the device maps and executes them."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import check_device_map, find_tied_parameters

from benchmarks.fork_server import fork_command
from fxpart.core.granularity import group_operators
from fxpart.core.module_paths import covering, parents
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.placement import make_mode
from fxpart.plan_export import DeviceMap, device_map, place_script, tiered_device_map
from tests.plan_export.scene import SPECS, random_plan, scene
from tests.sketch import devices

ROOT = Path(__file__).resolve().parent.parent.parent
PLANS = 2


def random_map(name: str, seed: int) -> DeviceMap:
    built, graph = scene(name)
    return device_map(graph, random_plan(graph, seed), list(built.module.state_dict()))


def check(name: str, mapped: DeviceMap) -> None:
    """Check that accelerate finds all entries and tensors, and tied parameters share a device."""
    built, graph = scene(name)
    # Warnings are errors here, and an entry that is no module is a warning.
    check_device_map(built.module, dict(mapped.entries))
    for group in find_tied_parameters(built.module):
        homes = [mapped.entries[covering(tied, mapped.entries) or ""] for tied in group]
        assert len(set(homes)) == 1, group
    assert sum(mapped.weight_bytes.values()) == graph.total_weight_bytes
    assert json.loads(json.dumps(mapped.entries)) == mapped.entries


@pytest.mark.parametrize("mode", ["single", "size_based", "kl_based"])
@pytest.mark.parametrize("name", SPECS)
def test_maps_of_planned_modules_are_accepted(name: str, mode: str) -> None:
    built, graph = scene(name)
    size = graph.total_weight_bytes + int(graph.value_bytes.sum())
    sizes = [size] if mode == "single" else [size * 2 // 3] * 3
    grouped = group_operators(graph, "module")
    plan = make_mode(mode)(make_problem(grouped, devices(*sizes), LatencyModel()))
    mapped = device_map(graph, plan, list(built.module.state_dict()))
    check(name, mapped)
    if mode == "single":
        assert mapped.entries == {"": 0}
        assert (mapped.moved, mapped.torn) == ((), ())


@pytest.mark.parametrize("name", SPECS)
def test_maps_of_random_plans_are_accepted(name: str) -> None:
    _, graph = scene(name)
    for seed in range(20):
        mapped = random_map(name, seed)
        check(name, mapped)
        assert list(random_map(name, seed).entries.items()) == list(mapped.entries.items())
        if not mapped.torn:
            # Accelerate's version of a plan is again a plan that it executes.
            second = device_map(
                graph,
                partition_by_device(graph, mapped.device_of),
                list(scene(name)[0].module.state_dict()),
            )
            assert second.entries == mapped.entries
            assert second.moved == ()


def test_names_are_needed_only_for_tensors_that_no_operator_uses() -> None:
    # For dlrm, no state dict has the buffers of its top: without it, each is a separate entry.
    for name in ("gpt2", "llama", "resnet", "bert"):
        built, graph = scene(name)
        for seed in range(5):
            mapped = device_map(graph, random_plan(graph, seed))
            check_device_map(built.module, dict(mapped.entries))


def test_accelerate_runs_every_module_on_the_device_of_the_map() -> None:
    """Dispatch on pretended devices: the same modules on the same devices.

    A plan whose map reports a torn module is one that torch refuses to run.
    """
    program = ("-m", "tests.plan_export.dispatched")
    code, printed, errors = fork_command(ROOT, program, [str(PLANS)], 300)
    assert code == 0, errors
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(lines) == PLANS * len(SPECS)
    assert {line["ran"] for line in lines} == {True, False}
    compared = 0
    for line in lines:
        mapped = random_map(line["name"], line["seed"])
        assert line["ran"] == (not mapped.torn), (line["name"], line["seed"], mapped.torn)
        compared += compare(line["name"], mapped, line["seen"]) if line["ran"] else 0
    assert compared > 50


def compare(name: str, mapped: DeviceMap, devices_of: dict[str, list[int]]) -> int:
    """Compare the device of the result of each module called once; return their number."""
    _, graph = scene(name)
    # The result of a module comes from its last operator or that of a submodule.
    last = {
        parent: op
        for op in np.flatnonzero(~graph.is_check).tolist()
        for parent in parents(graph.modules[op])
    }
    once = {
        path: calls[0] for path, calls in devices_of.items() if len(calls) == 1 and path in last
    }
    assert once == {path: int(mapped.device_of[last[path]]) for path in once}
    return len(once)


def test_the_script_loads_real_weights_on_the_planned_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in tiers: a device with a number would be a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SPECS["llama"].config)
    original = LlamaForCausalLM(LlamaConfig(**sizes))
    _, graph = scene("llama")
    tier_of = {
        op: "disk" if module.startswith("model.layers.1") else "cpu"
        for op, module in enumerate(graph.modules)
    }
    mapped = tiered_device_map(graph, np.full(graph.n_ops, -1), tier_of)
    assert set(mapped.entries.values()) == {"cpu", "disk"}
    assert mapped.main_device == "cpu"
    loaded = _check_script(tmp_path, monkeypatch, original, mapped)
    on_disk = {name for name, tensor in loaded.named_parameters() if tensor.is_meta}
    layer = {name for name, _ in original.named_parameters() if name.startswith("model.layers.1.")}
    assert on_disk == layer


def test_the_script_loads_experts_that_a_checkpoint_has_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SPECS["llama"].config, "num_local_experts": 4}
    original = MixtralForCausalLM(MixtralConfig(**sizes))
    whole = DeviceMap({"": "cpu"}, "cpu", np.zeros(1, dtype=np.int64), (), (), {})
    _check_script(tmp_path, monkeypatch, original, whole)


def _check_script(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    original: Any,  # noqa: ANN401 - a class of transformers
    mapped: DeviceMap,
) -> torch.nn.Module:
    """Check that the script loads what `original` saves, with the same results; return it."""
    original.save_pretrained(folder / "checkpoint")
    run = folder / "run"
    run.mkdir()
    (run / "device_map.json").write_text(json.dumps(mapped.entries))
    script = place_script(type(original).__name__, "float32")
    assert len(script.splitlines()) <= 15
    (run / "place.py").write_text(script)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["place.py", "checkpoint"])
    scope = runpy.run_path(str(run / "place.py"))
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        placed, expected = (each(tokens).logits for each in (scope["model"], original.eval()))
    assert torch.allclose(placed, expected, atol=1e-6)
    model: torch.nn.Module = scope["model"]
    return model
