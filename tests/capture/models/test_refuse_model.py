"""Models that torch cannot walk, move or name: one line each."""

import sys
from pathlib import Path

import pytest

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError

SOURCE = """
import torch
from torch import nn

X = (torch.zeros(1, 4),)

class Layer(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x)

def contains_itself(batch_size, dtype):
    model = Layer(); model.inner.again = model
    return model, X

def scripted(batch_size, dtype, inside=False):
    model = torch.jit.script(nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), model) if inside else model, X

def nested(batch_size, dtype, depth=2000):
    model = nn.Linear(4, 4)
    for _ in range(depth):
        model = Layer(model)
    return model, X

def shared(batch_size, dtype):
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, Layer(layer), layer), X

def named(batch_size, dtype, name="a"):
    model = Layer(); model._modules[name] = nn.Linear(4, 4)
    return model, X

def parameter(batch_size, dtype, name="a"):
    model = Layer(); model.register_parameter(name, nn.Parameter(torch.zeros(1)))
    return model, X

def lazy(batch_size, dtype):
    return nn.Sequential(nn.LazyLinear(4)), X

def sparse_weight(batch_size, dtype):
    model = Layer(); model.register_buffer("s", torch.eye(4, device="cpu").to_sparse_csr())
    return model, X

def sparse_input(batch_size, dtype):
    return Layer(), (torch.eye(4, device="cpu").to_sparse_csr(),)

def quantized_input(batch_size, dtype):
    sizes = {"scale": 1.0, "zero_point": 0, "dtype": torch.quint8, "device": "cpu"}
    return Layer(), (torch._empty_affine_quantized([1, 4], **sizes),)

def nested_input(batch_size, dtype):
    rows = [torch.zeros(1, 4, device="cpu")]
    return Layer(), (torch.nested.nested_tensor(rows, layout=torch.jagged),)

def endless_input(batch_size, dtype):
    item = []; item.append(item)
    return Layer(), (item,)

class Raises(Layer):
    def __init__(self, method, error):
        super().__init__()
        self.elsewhere = nn.Parameter(torch.zeros(1, device="cpu"))
        def strike(*args, **kwargs):
            raise error
        object.__setattr__(self, method, strike)

class Silent(Exception):
    def __str__(self):
        raise ValueError("no words")

def raises(batch_size, dtype, method="eval"):
    return Raises(method, ValueError("struck")), X

def bare(batch_size, dtype):
    return Raises("eval", BaseException("struck")), X

def silent(batch_size, dtype):
    raise Silent

class NoClass:
    @property
    def __class__(self):
        raise ValueError("struck")

def no_class(batch_size, dtype):
    return NoClass()
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "odd_models", raising=False)
    (tmp_path / "odd_models.py").write_text(SOURCE)


def _spec(function: str, **arguments: object) -> ModelSpec:
    return ModelSpec("m", factory=f"odd_models:{function}", factory_args=arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (_spec("contains_itself"), "module inner.again contains itself; take it out"),
        (_spec("scripted"), "its model is TorchScript, .*; return the nn.Module"),
        (_spec("scripted", inside=True), "module 1 is TorchScript"),
        (_spec("nested"), "modules are nested more than 128 deep"),
        (_spec("named", name="a\nimport os"), r"the name 'a\\nimport os' has a quote"),
        (_spec("named", name="a\0b"), r"the name 'a\\x00b'"),
        (_spec("parameter", name='a") or f("'), "has a quote, a backslash"),
        (_spec("lazy"), "weight 0.weight has no shape yet"),
        (_spec("sparse_weight"), "weight s is a sparse_csr tensor"),
        (_spec("sparse_input"), "input .* is a sparse_csr tensor"),
        (_spec("quantized_input"), "is a quantized tensor"),
        (_spec("nested_input"), "is a nested tensor"),
        (_spec("endless_input"), "cannot be prepared.*RecursionError"),
        (_spec("raises", method="eval"), r"cannot be prepared \(odd_models.py:\d+\): .*struck"),
        (_spec("raises", method="to"), "cannot be prepared .*struck"),
        (_spec("raises", method="named_parameters"), "cannot be prepared .*struck"),
        (_spec("bare"), "BaseException: struck"),
        (_spec("silent"), r"failed \(odd_models.py:\d+\): Silent$"),
        (_spec("no_class"), "cannot be prepared .*struck"),
    ],
)
def test_an_invalid_model_is_refused_in_one_line(spec: ModelSpec, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        build_model(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec", [_spec("nested", depth=100), _spec("shared"), _spec("named", name="fc-1 ä")]
)
def test_a_model_that_torch_can_walk_is_accepted(spec: ModelSpec) -> None:
    build_model(spec)
