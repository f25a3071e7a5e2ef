"""Lifetimes of values held by Python: by hand, and as counted in real eager calls."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.inference.eager_lifetimes import FOREVER, HELD, watched_export
from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph, without_python
from fxpart.core.phases import StepOptions
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError
from fxpart.execution.real_step import forward_peak_bytes, step_peak_bytes
from tests.execution.small_presets import SMALL_PRESETS

F = nn.functional


def _peak_bytes(graph: OpGraph) -> int:
    on_one = np.zeros(graph.n_ops, dtype=np.int64)
    return int(peak_bytes(memory_tables(graph), on_one, 1)[0])


class Local(nn.Module):
    """Its ``first`` is read once and kept to the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = x + 1
        second = first * 2
        return second.neg().exp()


class Rebound(nn.Module):
    """The same, with each result replacing the last."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = x * 2
        return x.neg().exp()


class Calls(nn.Module):
    """An argument is kept alive by the call, although the caller drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rebound()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.cos())
        return result


def _held(module: nn.Module) -> dict[str, str]:
    """Return for each value the operator after which Python drops it."""
    graph = capture_graph(module, (torch.ones(4, device="meta"),))
    return {
        name: graph.names[op]
        for name, op in zip(graph.value_names, graph.value_held, strict=True)
        if op >= 0
    }


def test_a_local_variable_lives_until_its_function_returns() -> None:
    assert _held(Local()) == {"add": "exp", "mul": "exp", "neg": "exp"}
    assert _held(Rebound()) == {"add": "mul", "mul": "exp", "neg": "exp"}


def test_an_argument_lives_until_the_call_returns() -> None:
    assert _held(Calls())["cos"] == "exp"


@pytest.mark.parametrize("module", [Local(), Rebound(), Calls()])
def test_the_peak_equals_that_of_a_real_call(module: nn.Module) -> None:
    x = torch.ones(1000)
    assert _peak_bytes(capture_graph(module, (x,))) == forward_peak_bytes(module, (x,))


def test_the_graph_alone_has_a_lower_peak() -> None:
    x = torch.ones(1000)
    assert _peak_bytes(without_python(capture_graph(Local(), (x,)))) == 3 * 4000
    assert _peak_bytes(capture_graph(Local(), (x,))) == 5 * 4000


@pytest.mark.parametrize("name", ["gpt2", "dlrm", "resnet50", "vit_large", "mixtral_8x7b"])
def test_published_architectures_are_within_two_percent_of_a_real_call(name: str) -> None:
    spec = SMALL_PRESETS[name]
    planned, real = build_model(spec), build_model(spec, torch.device("cpu"))
    graph = capture_graph(planned.module, planned.args, planned.kwargs)
    counted = forward_peak_bytes(real.module, real.args, real.kwargs)
    assert abs(_peak_bytes(graph) / counted - 1) < 0.02


def test_a_model_that_cannot_be_captured_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cos() if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="branches on the values of a tensor"):
        capture_graph(Branches(), (torch.ones(4),))


class Wide(nn.Module):
    """A local variable that no gradient needs, and that outlives its reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 1000), nn.Linear(1000, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        shifted = wide + 1
        halved = shifted * 0.5
        result: Tensor = self.last(halved) + x.sum()
        return result


def test_a_training_step_holds_the_local_variables_of_its_forward() -> None:
    module, x = Wide(), torch.ones(100, 4)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    counted = step_peak_bytes(module, (x,))
    assert _peak_bytes(graph) == counted.peak_bytes
    assert counted.phase == "forward"
    assert _peak_bytes(without_python(graph)) < counted.peak_bytes - 300_000
    of_forward = graph.value_producer < graph.first_backward
    assert graph.value_held[of_forward].max() < graph.first_backward


class Sorts(nn.Module):
    """Returns from a function whose last call has two results; its large argument is unread."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self._sorted(hidden, hidden.detach().repeat(1, 50)) * 2

    def _sorted(self, x: Tensor, _large: Tensor) -> Tensor:
        return x.sort().values


def test_an_argument_is_held_during_a_call_with_several_results() -> None:
    module, x = Sorts(), torch.ones(100, 4)
    # The weights, the input, the layer's result, the argument, values and places.
    whole = 4 * 5 * 4 + 100 * 4 * (4 + 4 + 50 * 4 + 4 + 8)
    assert _peak_bytes(capture_graph(module, (x,))) == forward_peak_bytes(module, (x,)) == whole
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    assert _peak_bytes(graph) == step_peak_bytes(module, (x,)).peak_bytes == whole


class Unread(nn.Module):
    """Returns a large result beside the one that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(4, 4), nn.Linear(4, 2000)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden, self.beside(hidden).tanh()


def test_a_training_step_computes_results_that_the_loss_does_not_read() -> None:
    module, x = Unread(), torch.ones(100, 4)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    counted = step_peak_bytes(module, (x,))
    assert counted.phase == "forward"
    assert _peak_bytes(graph) == counted.peak_bytes


class Logged(nn.Module):
    """Collects results of a head that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 2000)

    def forward(self, x: Tensor) -> Tensor:
        log = []
        for layer in self.layers:
            x = layer(x)
            log.append(self.head(x).softmax(-1))
        return x


class Monitored(nn.Module):
    """Keeps intermediate results in attributes, one of them in a list, until the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        wide = self.layer(x).repeat(1, 500)
        self.seen, self.last = [wide * 2], wide + 1
        result: Tensor = self.layer(wide.reshape(-1, 4)).sum(0)
        return result


class SavedForSizes(nn.Module):
    """Its gather and its transform save their operands, and read only the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        few = x.gather(-1, torch.zeros(len(x), 2, dtype=torch.long, device=x.device))
        result: Tensor = few.exp() * torch.fft.rfft(self.layer(x[:, :4]))[:, :2].real
        return result


@pytest.mark.parametrize("module", [Logged(), Monitored(), SavedForSizes()])
def test_a_training_step_holds_what_python_and_autograd_hold(module: nn.Module) -> None:
    x = torch.ones(100, 4)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    # The counter may have the gradient of the loss, one number, beside the peak.
    assert 0 <= step_peak_bytes(module, (x,)).peak_bytes - _peak_bytes(graph) <= 4


class Then(nn.Module):
    """A product, and a call that torch composes of several."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer(x))


def _masked_attention(x: Tensor) -> Tensor:
    mask = torch.ones(32, 32, dtype=torch.bool, device=x.device)
    heads = x[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def _in_region(x: Tensor) -> Tensor:
    with torch.enable_grad():
        mixed = x
        for _ in range(3):
            mixed = (mixed @ x.transpose(1, 2)).softmax(-1) @ x
        return mixed + x


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1)),
        lambda x: x.transpose(1, 2).unsqueeze(1).expand(-1, 4, -1, -1) @ x.unsqueeze(1),
        lambda x: F.cosine_similarity(x, x.flip(1), dim=-1),
        lambda x: F.group_norm(x.transpose(1, 2), 4),
        lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        _masked_attention,
        _in_region,
    ],
)
def test_the_parts_of_a_composite_call_count_while_it_runs(
    call: Callable[[Tensor], Tensor],
) -> None:
    module, x = Then(call), torch.ones(3, 32, 64)
    assert _peak_bytes(capture_graph(module, (x,))) == forward_peak_bytes(module, (x,))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.pow(2).mean(-1),
        lambda x: x.logsumexp(-1),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.cosine_similarity(x, x.flip(1), dim=-1),
        lambda x: F.rms_norm(x, (64,)),
    ],
)
def test_operands_of_a_formula_live_until_its_expression_is_computed(
    call: Callable[[Tensor], Tensor],
) -> None:
    module, x = Then(call), torch.ones(3, 128, 64)
    predicted = _peak_bytes(joint_capture(module, (x,), options=StepOptions()).graph)
    assert 0 <= step_peak_bytes(module, (x,)).peak_bytes - predicted <= 4


class AsRows(nn.Module):
    """Returns a view of its last value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.layer(x).view(-1, 2, 128).flatten(1)
        return rows


def test_what_a_returned_view_was_made_from_lives_as_long_as_the_result() -> None:
    module, x = AsRows(), torch.ones(512, 64)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    counted = step_peak_bytes(module, (x,))
    assert counted.phase == "backward"
    assert 0 <= counted.peak_bytes - _peak_bytes(graph) <= 4


class Written(AsRows):
    """Returns a view of a value that it writes to last."""

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layer(x)
        rows = value.view(-1, 2, 128).flatten(1)
        value.add_(1)
        return rows


def test_a_value_written_to_last_is_not_held_beyond_the_forward() -> None:
    program = watched_export(Written(), (torch.ones(4, 64),), {}, None)
    releases = {node.name: node.meta[HELD] for node in program.graph.nodes if HELD in node.meta}
    assert releases.keys() >= {"linear", "add_"}
    assert FOREVER not in {release for known in releases.values() for release in known}


class Keeps(nn.Module):
    """Keeps a value that shares memory with its result, or is cut off from its gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, torch.empty(0)
        self.layer = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layer(x)
        if self.how == "view of the result":
            self.kept = value[:, :3]
            return value
        if self.how == "result is a view":
            self.kept = value
            return value.t()
        if self.how == "detached":
            self.kept = value.detach()
        else:
            self.kept = value.data if self.how == "data" else torch.detach(input=value)
        few: Tensor = self.layer(x[:4])
        return few


@pytest.mark.parametrize(
    "how", ["view of the result", "result is a view", "detached", "by name", "data"]
)
def test_an_attribute_is_held_though_a_result_or_a_gradient_has_left_it(how: str) -> None:
    x = torch.ones(512, 64)
    graph = joint_capture(Keeps(how), (x,), options=StepOptions()).graph
    module = Keeps(how)
    counted = step_peak_bytes(module, (x,))
    # What an earlier call kept lives until the forward replaces it; the backward comes later.
    assert 0 <= counted.backward_bytes - _peak_bytes(graph) <= 4


class Overwritten(nn.Module):
    """Writes to what a head that the loss does not read has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.beside = nn.Linear(4, 400), nn.Linear(400, 400)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        beside = self.beside(hidden)
        return hidden.add_(1), beside


def test_what_a_gradient_that_is_not_computed_has_saved_may_be_overwritten() -> None:
    module, x = Overwritten(), torch.ones(100, 4)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    assert _peak_bytes(graph) == step_peak_bytes(module, (x,)).peak_bytes
