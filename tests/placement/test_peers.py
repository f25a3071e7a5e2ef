"""Peers as modes: the choices of accelerate and Mt-KaHyPar under the same conditions."""

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory

from fxpart.core.module_paths import covering
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.accelerate import AccelerateOptions, inferred_device_map
from runner.experiment.user_mode import chosen_mode
from tests import independent
from tests.execution.scene import small
from tests.runner.composed import read
from tests.sketch import Sketch, devices, problem, random_graph

BLOCKS = {"gpt2": "GPT2Block", "llama2_7b": "LlamaDecoderLayer"}


@pytest.mark.parametrize("name", BLOCKS)
def test_operators_follow_the_device_map_of_accelerate(name: str) -> None:
    graph, module = small(name).graph, small(name).module
    whole = 2 * graph.total_weight_bytes + int(graph.value_bytes.sum())
    this, whole_classes = problem(graph, devices(*[whole] * 3)), [BLOCKS[name]]
    memory = get_balanced_memory(module, dict(enumerate([whole] * 3)), whole_classes)
    expected = infer_auto_device_map(module, memory, whole_classes)
    assert len(set(expected.values())) > 1
    placed = make_mode("accelerate", {"model": lambda: module, "balanced": True})(this)
    homes = [covering(path, expected) for path in graph.modules]
    inside = [op for op, home in enumerate(homes) if home is not None and graph.group[op] == op]
    assert len(inside) > graph.n_ops // 2
    assert all(placed.device_of[op] == expected[homes[op] or ""] for op in inside)
    # Not balanced, the first device takes all that it can hold.
    assert set(make_mode("accelerate", {"model": lambda: module})(this).device_of) == {0}


def test_modules_that_accelerate_leaves_to_the_disk_are_refused() -> None:
    module = small("gpt2").module
    with pytest.raises(InfeasibleError, match=r"accelerate leaves .* to the CPU or a disk"):
        inferred_device_map(module, [1000, 1000], AccelerateOptions())
    # Accelerate warns of buffers that do not fit on any device; warnings are errors here.
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with pytest.raises(InfeasibleError, match="to the CPU or a disk"):
        inferred_device_map(module, [8, 8], AccelerateOptions())


def test_an_unknown_module_class_to_keep_whole_is_refused() -> None:
    options = AccelerateOptions(no_split=["GPT2Blok"])
    with pytest.raises(SpecError, match="no module of class GPT2Blok; nearest: GPT2Block"):
        inferred_device_map(small("gpt2").module, [10**9], options)


def test_a_run_passes_its_model_to_accelerate() -> None:
    model = ("model=gpt2", "model.config.n_layer=1", "model.config.n_embd=48")
    place = chosen_mode(read("mode=accelerate", *model))
    with pytest.raises(InfeasibleError, match="accelerate leaves"):
        place(problem(small("gpt2").graph, devices(10)))
    with pytest.raises(SpecError, match="without weights in few bits; use another mode"):
        chosen_mode(read("mode=accelerate", "weights=int4", *model))
    with pytest.raises(SpecError, match="devices only, and host64gb is a tier; leave it out"):
        chosen_mode(read("mode=accelerate", "devices=1x1gb+host64gb", *model))


@pytest.mark.parametrize("name", ["accelerate", "mtkahypar"])
def test_a_peer_without_its_package_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    peer = import_module(f"fxpart.placement.{name}")
    monkeypatch.setattr(peer, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=rf"needs {name}; pip install 'fxpart\[{name}\]'$"):
        make_mode(name)


@pytest.mark.skipif(find_spec("mtkahypar") is None, reason="mtkahypar is not installed")
def test_a_hypergraph_is_cut_where_the_fewest_bytes_are_sent() -> None:
    sketch = Sketch()
    value = sketch.input(1)
    for op in range(16):
        # One small output, between heavy ones.
        size_bytes = 1 if op == 7 else 50
        value = sketch.op([value], size_bytes, [sketch.weight(10)], flops=10, module=f"layer{op}")
    this = problem(sketch.graph(value), devices(300, 300))
    placed = make_mode("mtkahypar")(this).device_of
    assert len(set(placed[:8].tolist())) == len(set(placed[8:].tolist())) == 1
    assert placed[0] != placed[8]
    assert np.array_equal(placed, make_mode("mtkahypar")(this).device_of)


@pytest.mark.skipif(find_spec("mtkahypar") is None, reason="mtkahypar is not installed")
def test_partitions_respect_memory_and_groups_and_refuse_no_more_than_filling() -> None:
    placeable = 0
    for seed in range(12):
        graph = random_graph(seed, 20)
        whole = independent.peak_bytes(graph, np.zeros(20, dtype=np.int64), 0)
        shares = ((0.7, 0.8, 0.6), (0.9, 0.95, 0.3), (0.3, 0.5, 0.4))[seed % 3]
        sizes = [int(whole * share) for share in shares]
        this = problem(graph, devices(*sizes, speeds=[1.0, 2.0, 4.0]))
        try:
            device_of = make_mode("mtkahypar")(this).device_of
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                make_mode("size_based")(this)
            continue
        placeable += 1
        assert (device_of == device_of[graph.group]).all()
        for device, size in enumerate(sizes):
            assert independent.peak_bytes(graph, device_of, device) <= size
    assert placeable >= 8
