"""Odd models: they raise, have odd names or tensors, or contain themselves."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.fuzz.judge import Tally
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import OpGraph

__all__ = ["fuzz_models", "odd_model"]

_FACTORY = f"{__name__}:odd_model"
_WIDTH = 4


class _Odd(nn.Module):
    """A layer that misbehaves as `trait` says, in the method of that name."""

    def __init__(self, trait: str, inner: nn.Module) -> None:
        super().__init__()
        self.trait, self.inner = trait, inner

    def _raise_if(self, where: str) -> None:
        method, _, error = self.trait.partition(" ")
        if method == where:
            raise _ERRORS[error]

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the inner layer."""
        self._raise_if("forward")
        if self.trait == "branch":
            return x if x.sum() > 0 else -x
        out: Tensor = self.inner(x)
        return out

    def train(self, mode: bool = True) -> "_Odd":
        """Set the mode; `eval` calls this too."""
        self._raise_if("train")
        super().train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> "_Odd":  # noqa: ANN401 - as torch has it
        """Move the layer."""
        self._raise_if("to")
        return super().to(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch has it
        """Yield the parameters."""
        self._raise_if("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def __str__(self) -> str:
        """Return a name."""
        self._raise_if("__str__")
        return "odd"

    __repr__ = __str__


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


_ERRORS = {
    "plain": ValueError("two\nlines"),
    "exit": SystemExit(0),
    "bare": BaseException("bare"),
    "silent": _SilentError(),
}
_METHODS = ("forward", "train", "to", "named_parameters", "__str__")
_TRAITS = (
    "none",
    "branch",
    *(f"{method} {way}" for method in _METHODS for way in _ERRORS),
)
_NAMES = ("a\nb", "a\0b", "a'b", 'a")b', "a b", "ä", "1", "a\\b", "self", "class", "\u2028")
_TENSORS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.zeros(2, _WIDTH),
    "csr": lambda: torch.eye(_WIDTH, device="cpu").to_sparse_csr(),
    "coo": lambda: torch.eye(_WIDTH, device="cpu").to_sparse(),
    "quantized": lambda: torch._empty_affine_quantized(
        [_WIDTH, _WIDTH], scale=0.1, zero_point=0, dtype=torch.quint8, device="cpu"
    ),
    "nested": lambda: torch.nested.nested_tensor(
        [torch.zeros(1, _WIDTH, device="cpu")] * 2, layout=torch.jagged
    ),
    "empty": lambda: torch.zeros(0, _WIDTH),
    "complex": lambda: torch.zeros(2, _WIDTH, dtype=torch.complex64),
    "scalar": lambda: torch.zeros(()),
}


def odd_model(batch_size: int, dtype: torch.dtype, choices: list[Any]) -> object:
    """Return a small model with the traits named by `choices`, and inputs for it."""
    seed, trait, name, buffer, value, shape = choices
    rnd = Random(seed)
    model: nn.Module = nn.Linear(_WIDTH, _WIDTH, dtype=dtype)
    if shape == "lazy":
        model = nn.LazyLinear(_WIDTH)
    for _ in range({"deep": 2000, "nested": 5}.get(shape, 1)):
        model = _Odd(trait, model)
        trait = trait if rnd.random() < 0.5 else "none"
    if shape == "self":
        model.again = model
    if name:
        model._modules[name] = nn.Linear(_WIDTH, _WIDTH)
        model._parameters[f"p{name}"] = nn.Parameter(torch.zeros(2))
    if buffer:
        model.register_buffer("odd", _TENSORS[buffer]())
    if shape == "nothing":
        return model
    return model, (_TENSORS[value](),)


def _unprintable_name(graph: OpGraph) -> str | None:
    for name in (*graph.names, *graph.modules, *graph.weight_names):
        if not name.isprintable():
            return f"the name {name!r} in the graph"
    return None


def _capture(choices: list[Any]) -> OpGraph:
    built = build_model(ModelSpec("odd", factory=_FACTORY, factory_args={"choices": choices}))
    return capture_graph(built.module, built.args, built.kwargs, "operator")


def fuzz_models(run: Callable[[Any, int], None], cases: int) -> Tally:
    """Try `cases` models; `run` as in `fuzz_specs`."""
    tally = Tally("models")
    rarely = st.sampled_from(("", "", ""))

    @given(
        st.tuples(
            st.integers(0, 99),
            st.sampled_from(_TRAITS),
            rarely | st.sampled_from(_NAMES),
            rarely | st.sampled_from(tuple(_TENSORS)),
            st.sampled_from(("dense", *_TENSORS)),
            st.sampled_from(("one", "one", "one", "nested", "deep", "self", "lazy", "nothing")),
        )
    )
    def models(choices: tuple[Any, ...]) -> None:
        options = list(choices)
        tally.attempt(f"model {options}", lambda: _capture(options), _unprintable_name)

    run(models, cases)
    return tally
