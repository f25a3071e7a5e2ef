"""Memory kept between a forward and its backward, and the peak of both."""

import random

import pytest
import torch
import torch._inductor.fx_passes.memory_estimator as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.errors import CaptureError
from fxpart.torch_compat.memory import (
    build_memory_profile,
    get_fwd_bwd_interactions,
    get_peak_memory,
)
from tests.torch_compat.memory.scene import Drawing, aten, random_drawing


def _pair(*, same_storages: bool) -> tuple[fx.Graph, fx.Graph]:
    """Return a forward of three inputs and a backward that reads two of its returned values."""
    d = Drawing()
    a, b, _ = (d.input(name, 4, 4) for name in ("primals_1", "primals_2", "primals_3"))
    product = d.call(aten.mm.default, a, b)  # 64 bytes
    turned = d.call(aten.t.default, b)
    wide = d.call(aten.repeat.default, product, [2, 1])  # 128
    result = d.call(aten.sum.default, wide)  # 4
    forward = d.done(result, product, turned)
    e = Drawing()
    with d.mode if same_storages else e.mode:
        read_values = [
            e.given(n.name, n.meta["val"] if same_storages else torch.empty(4, 4))
            for n in (product, turned)
        ]
    e.mode = d.mode if same_storages else e.mode
    tangent = e.input("tangents_1")
    grown = e.call(aten.mul.Tensor, read_values[0], tangent)
    gradient = e.call(aten.mm.default, grown, read_values[1])
    return forward, e.done(gradient)


@pytest.mark.parametrize("same_storages", [True, False], ids=["by storage", "by name"])
def test_a_pair_by_hand(same_storages: bool) -> None:
    forward, backward = _pair(same_storages=same_storages)
    # The backward reads neither the first and third input, 64 bytes each, nor the result.
    # The view of the second input and the tangent may not be released.
    resident, kept = get_fwd_bwd_interactions(forward, backward)
    assert resident == 64 + 64 + 4
    assert kept == {"t_default", "tangents_1"}
    # Product, the second input and the tangent; the grown one; the product is freed; the gradient.
    profile = build_memory_profile(backward, lambda node: node.name not in kept)
    assert profile == [132, 196, 132, 196, 132]
    # The forward: 192 of inputs, product, 128 and their sum.
    assert get_peak_memory(forward, backward) == max(192 + 64 + 128 + 4, resident + 196) == 388
    doubled = get_peak_memory(forward, backward, lambda size: 2 * int(size))
    assert doubled == 2 * 388


def test_the_peak_may_be_in_the_backward() -> None:
    d = Drawing()
    x = d.input("primals_1", 4)
    total, negative = d.call(aten.sum.default, x), d.call(aten.neg.default, x)
    forward = d.done(total, negative)
    e = Drawing()
    saved = e.given(negative.name, negative.meta["val"])
    e.mode = d.mode
    wide = e.call(aten.repeat.default, saved, [10])
    backward = e.done(e.call(aten.neg.default, wide))
    # The input and the sum stay, and the negative until it is read.
    assert get_peak_memory(forward, backward) == 16 + 4 + 160 + 160
    assert get_fwd_bwd_interactions(forward, backward) == (20, set())
    # If the negative also belongs to the caller, it stays.
    assert get_peak_memory(forward, backward, n_results=2) == 16 + 4 + 16 + 160 + 160
    assert get_fwd_bwd_interactions(forward, backward, n_results=2) == (20, {"neg_default"})


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_numbers_equal_those_of_torch_with_its_error_fixed(seed: int) -> None:
    rng = random.Random(seed)
    forward = random_drawing(seed, device="cuda", unread=False)
    for node in forward.find_nodes(op="placeholder"):
        node.name = f"primals_{node.name}"
    returned = forward.output_node().all_input_nodes
    read_values = rng.sample(returned, rng.randint(0, len(returned)))
    e = Drawing("cuda")
    for node in read_values:
        e.given(node.name, node.meta["val"])
    e.input("tangents_1", 4)
    backward = e.done()
    resident, kept = get_fwd_bwd_interactions(forward, backward)
    with pytest.MonkeyPatch.context() as mended:
        mended.setattr(fx.Node, "__getitem__", lambda node, _: node, raising=False)
        their_stays, their_kept = theirs.get_fwd_bwd_interactions(forward, backward)
    assert kept == set(their_kept)
    storages = _storages([*read_values, *returned])
    unread = {
        key: size
        for key, size in _storages(forward.find_nodes(op="placeholder")).items()
        if key not in storages
    }
    assert resident == their_stays + sum(unread.values())


def _storages(nodes: list[fx.Node]) -> dict[int, int]:
    return storage_sizes(node.meta["val"] for node in nodes)


def _step(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.gelu(x @ weight.t() + bias)
    return torch.softmax(hidden.view(2, -1), dim=1).square().sum()


def test_the_peak_of_a_compiled_step_is_that_of_a_run() -> None:
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: object) -> object:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    weight, bias = (torch.randn(8, 6, requires_grad=True), torch.randn(8, requires_grad=True))
    x = torch.randn(4, 6)
    compiled = aot_function(_step, keep, keep, partition_fn=default_partition)
    compiled(weight, bias, x).backward()
    forward, backward = graphs
    predicted = get_peak_memory(forward.graph, backward.graph, n_results=1)
    inputs, tangent = [weight.detach(), bias.detach(), x], torch.ones(())
    # The peak is in the backward, which takes the tangent: it may count from the start.
    counter = LiveBytes([storage_sizes([*inputs, tangent])])
    with torch.no_grad(), counter:
        result, *saved = fx.Interpreter(forward).boxed_run(list(inputs))
        saved.append(tangent)
        gradients = fx.Interpreter(backward).boxed_run(saved)
    assert counter.peak_bytes == (predicted,)
    before = build_memory_profile(forward.graph, lambda node: node.op != "placeholder")
    assert predicted > max(before)
    torch.testing.assert_close(gradients[0], weight.grad)
    assert result.ndim == 0


def test_a_forward_without_output_is_refused() -> None:
    graph = Drawing().graph
    with pytest.raises(CaptureError, match=r"the forward graph has no output.*; give it one"):
        get_peak_memory(graph, Drawing().done())
    with pytest.raises(CaptureError, match="the forward graph has no output"):
        get_fwd_bwd_interactions(graph, Drawing().done())
