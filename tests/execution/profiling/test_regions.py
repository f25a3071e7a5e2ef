"""Regions measured as one operator: run in their mode, distinguished by their content."""

import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import joint_capture
from fxpart.execution.profiling.api import profile_operators
from fxpart.execution.profiling.passes import measure
from fxpart.execution.profiling.steps import signature, steps_of
from fxpart.execution.profiling.tensors import placeholders_of

CPU = torch.device("cpu")


class Autocast(nn.Module):
    """Two autocast layers that read the dtype inside, around a float32 layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inside, self.again = nn.Linear(16, width), nn.Linear(width, 16)
        self.outside = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.again(self.inside(x).float() + torch.ones(1, device=x.device))
        result: Tensor = self.outside(low.float())
        return result


class Gradients(nn.Module):
    """A lookup of computed indices, with gradients enabled or disabled."""

    def __init__(self, enabled: bool, shift: int = 0) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 16), nn.Linear(16, 16)
        self.enabled, self.shift = enabled, shift

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if self.enabled else torch.no_grad():
            places = x.view(-1) + self.shift if self.shift else x.view(-1)
            y = self.table(places) * torch.ones(16, device=x.device)
        result: Tensor = self.linear(y)
        return result


def _on(device: str, module: type[nn.Module], *args: object) -> nn.Module:
    with torch.device(device):
        return module(*args)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_autocast_is_measured_as_one_operator(device: str) -> None:
    x = torch.empty(4, 16, device=device)
    program = export_program(_on(device, Autocast), (x,))
    graph = op_graph(program)
    assert "wrap_with_autocast" in graph.targets
    profile = profile_operators(program, graph, repeats=2)
    assert len(profile.seconds) == graph.n_ops
    assert (profile.seconds > 0).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_under_no_gradients_are_measured(device: str) -> None:
    x = torch.zeros(4, dtype=torch.int64, device=device)
    program = export_program(_on(device, Gradients, True), (x,))
    assert "wrap_with_set_grad_enabled" in op_graph(program).targets
    profile = profile_operators(program, op_graph(program), repeats=1)
    assert (profile.seconds > 0).all()


def test_the_forward_of_a_training_step_is_measured() -> None:
    step = joint_capture(Gradients(False), (torch.zeros(4, dtype=torch.int64),))
    graph = op_graph(step.forward)
    assert "wrap_with_set_grad_enabled" in graph.targets
    assert (profile_operators(step.forward, graph, repeats=1).seconds > 0).all()


class Seen(fx.Interpreter):
    """Records the modes in which a body runs, and the dtypes and numbers of its inputs."""

    def run_node(self, n: fx.Node) -> object:
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        result = super().run_node(n)
        if isinstance(result, Tensor):
            made.append(result)
        return result


modes: list[tuple[bool, bool]] = []
made: list[Tensor] = []


@pytest.mark.parametrize(
    ("module", "x", "expected"),
    [
        (Autocast(), torch.zeros(4, 16), (False, True)),
        (Gradients(True), torch.zeros(4, dtype=torch.int64), (True, False)),
        (Gradients(True, 2), torch.zeros(4, dtype=torch.int64), (True, False)),
    ],
    ids=["autocast", "gradients", "shifted"],
)
def test_the_body_is_run_in_its_mode(
    module: nn.Module, x: Tensor, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = export_program(module, (x,))
    steps = steps_of(program, op_graph(program), CPU)
    (region,) = [step for step in steps if step.is_region]
    (body,) = [given for given in region.args if isinstance(given, fx.GraphModule)]
    monkeypatch.setattr(type(body), "forward", lambda self, *given: Seen(self).run(*given))
    modes.clear()
    made.clear()
    measure(steps, placeholders_of(program, CPU), 1, frozenset(), float("inf"))
    assert modes
    assert set(modes) == {expected}
    indices = [tensor for tensor in made if tensor.dtype == torch.int64]
    assert bool(indices) == (x.dtype == torch.int64)
    # Created indices are up to 32768, and the table has 7 rows.
    assert all(int(tensor.max()) < 7 for tensor in indices)
    assert (torch.bfloat16 in {tensor.dtype for tensor in made}) == expected[1]


def test_an_empty_region_is_measured() -> None:
    class Switched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # Called instead of entered: torch exports an empty region before the real one.
            with torch.set_grad_enabled(True):
                return x + 1

    program = export_program(Switched(), (torch.zeros(4),))
    graph = op_graph(program)
    assert graph.targets.count("wrap_with_set_grad_enabled") == 2
    assert (profile_operators(program, graph, repeats=1).seconds > 0).all()


def test_regions_with_other_calls_have_other_signatures() -> None:
    signatures = set()
    for module in (Autocast(), Autocast(8), Autocast()):
        program = export_program(module, (torch.zeros(4, 16),))
        (region,) = [n for n in program.graph.nodes if "autocast" in str(n.target)]
        signatures.add(signature(region))
    assert len(signatures) == 2


def test_the_program_keeps_its_region() -> None:
    program = export_program(_on("meta", Autocast), (torch.empty(4, 16, device="meta"),))
    (body,) = [m for m in program.graph_module.children() if isinstance(m, fx.GraphModule)]
    before = body.code
    assert "meta" in before
    profile_operators(program, op_graph(program), repeats=1)
    assert body.code == before
