"""Models from a user's function: its arguments, and every possible mistake."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError, FxpartError, SpecError

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn

class Table(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(4, 2, dtype=dtype)
        self.register_buffer("order", torch.arange(4, device="cpu"))

def plain(batch_size, dtype):
    return Table(dtype), (torch.zeros(batch_size, 4, dtype=dtype),)

def named(batch_size, dtype, width=4, seq_len=5):
    x = torch.zeros(batch_size, seq_len, width, dtype=dtype, device="cpu")
    return nn.Linear(width, 2, dtype=dtype), (x,), {"scale": torch.ones(1)}

def open_ended(**given):
    return nn.Identity(), (torch.zeros(given["batch_size"], given["depth"]),)

@dataclass
class Output:
    logits: torch.Tensor
    parts: list

class Answers(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x), [Output(x, [])])

def answers(batch_size, dtype):
    return Answers(3, 2), (torch.zeros(batch_size, 3),)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    def forward(self, x):
        for expert in self.experts:
            tokens = x[x[:, 0] > 0]
            if tokens.shape[0]:
                x = x + expert(tokens).sum()
        return x

def mixture(batch_size, dtype):
    return Mixture(), (torch.zeros(batch_size, 3),)

def must_know_length(batch_size, dtype, seq_len):
    return nn.Identity(), ()

def must_know_depth(batch_size, dtype, depth):
    return nn.Identity(), ()

def no_batch(dtype):
    return nn.Identity(), ()

def no_parameters():
    return nn.Identity(), ()

def module_only(batch_size, dtype):
    return nn.Identity()

def bare_input(batch_size, dtype):
    return nn.Identity(), torch.zeros(1)

def fails(batch_size, dtype):
    raise KeyError("first line\\nsecond line")

def refuses(batch_size, dtype):
    from fxpart.errors import SpecError
    raise SpecError("in its own words")

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "user_models", raising=False)
    (tmp_path / "user_models.py").write_text(SOURCE)


def spec(function: str, module: str = "user_models", **fields: Any) -> ModelSpec:  # noqa: ANN401
    return ModelSpec("m", factory=f"{module}:{function}", **fields)


def test_the_model_ends_on_meta_in_eval_mode() -> None:
    model = build_model(spec("plain", batch_size=3, dtype="bfloat16"))
    (x,) = model.args
    assert (tuple(x.shape), x.dtype, x.is_meta) == ((3, 4), torch.bfloat16, True)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    # The buffer that was created on the CPU by name is moved too.
    assert all(t.is_meta for t in [*model.module.parameters(), *model.module.buffers()])
    assert not model.module.training
    assert model.kwargs == {}


def test_arguments_reach_the_function() -> None:
    model = build_model(spec("named", factory_args={"width": 6}, batch_size=2, seq_len=9))
    assert tuple(model.args[0].shape) == (2, 9, 6)
    assert model.args[0].is_meta
    assert model.kwargs["scale"].is_meta


def test_an_unset_length_is_left_to_the_function() -> None:
    assert tuple(build_model(spec("named")).args[0].shape) == (1, 5, 4)


def test_a_function_may_accept_any_arguments() -> None:
    model = build_model(spec("open_ended", batch_size=2, factory_args={"depth": 7}))
    assert tuple(model.args[0].shape) == (2, 7)


def test_a_forward_may_return_dataclasses() -> None:
    built = build_model(spec("answers"))
    assert capture_graph(built.module, built.args).n_ops == 1


def test_a_mixture_that_branches_on_its_tokens_gets_advice() -> None:
    built = build_model(spec("mixture"))
    with pytest.raises(CaptureError, match="let each expert compute all tokens"):
        capture_graph(built.module, built.args)


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (spec("plane"), SpecError, "user_models has no plane; nearest: plain"),
        (spec("NUMBER"), SpecError, "NUMBER of user_models is not a function .*type int"),
        (spec("f", module="user_model"), SpecError, "no module user_model; nearest: user_models"),
        (spec("named", factory_args={"witdh": 6}), SpecError, "takes no witdh .* nearest: width"),
        (spec("named", factory_args={"dtype": 6}), SpecError, "dtype is set by model.dtype"),
        (spec("plain", seq_len=4), SpecError, r"takes no seq_len \(model.seq_len\)"),
        (spec("no_batch"), SpecError, r"takes no batch_size \(model.batch_size\)"),
        (spec("no_parameters"), SpecError, "no parameters; let it take batch_size and dtype$"),
        (spec("must_know_length"), SpecError, "needs a sequence length; set model.seq_len"),
        (spec("must_know_depth"), SpecError, "also needs depth; set model.factory_args.depth"),
        (spec("dict", module="builtins"), SpecError, "has no readable signature"),
        (spec("module_only"), SpecError, r"returned Identity; return \(module, args\)"),
        (spec("bare_input"), SpecError, r"returned \(Identity, Tensor\)"),
        (spec("refuses"), SpecError, "^in its own words$"),
        (spec("fails"), CaptureError, r"failed \(user_models\.py:\d+\): KeyError: .*first line"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    refused: ModelSpec, kind: type[FxpartError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        build_model(refused)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("lacks_dependency", "import no_such_dependency", "No module named 'no_such_dependency'"),
        ("has_typo", "def f(:", "SyntaxError"),
        ("stumbles", "1 / 0", "ZeroDivisionError: division by zero"),
        ("ends", "raise SystemExit(0)", "SystemExit: 0"),
        ("is_odd", "raise BaseException('odd')", "BaseException: odd"),
    ],
)
def test_the_reason_of_a_failed_import_is_reported(module: str, source: str, message: str) -> None:
    Path(f"{module}.py").write_text(source)
    with pytest.raises(
        CaptureError, match=rf"importing it fails( \({module}\.py:1\))?: .*{message}"
    ) as caught:
        build_model(spec("f", module=module))
    assert "\n" not in str(caught.value)


def test_a_factory_does_not_import_transformers() -> None:
    """Importing it takes seconds."""
    program = (
        "import sys; from fxpart.capture.api import capture\n"
        "from fxpart.capture.models.build import build_model\n"
        "from fxpart.capture.models.spec import ModelSpec\n"
        "built = build_model(ModelSpec('m', factory='user_models:answers'))\n"
        "capture(built.module, built.args, built.kwargs)\n"
        "print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
