"""`autocast`, `with_own_regions`: apply the casts of CUDA's `torch.autocast` on any device.

`torch.autocast("cuda")` does nothing without a GPU, does not exist for meta tensors, and the CPU's
has other lists of functions. The lists here are those of torch's ``ATen/autocast_mode.h`` (and of
its page "Automatic Mixed Precision package"), by the Python names of the functions;
``tests/capture/models/test_autocast.py`` compares them.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["autocast", "regions_of_cuda", "with_own_regions"]

IN_16_BITS = frozenset(
    {
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "_convolution",
        "einsum",
        "gru_cell",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "lstm_cell",
        "matmul",
        "mm",
        "mv",
        "prelu",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "scaled_dot_product_attention",
        # Made of these.
        "__matmul__",
        "__rmatmul__",
        "gru",
        "lstm",
        "multi_head_attention_forward",
        "rnn_relu",
        "rnn_tanh",
    }
)
"""Functions whose floating-point operands are cast to 16 bits."""
IN_FLOAT32 = frozenset(
    {
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cdist",
        "cosh",
        "cosine_embedding_loss",
        "cosine_similarity",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "frobenius_norm",
        "group_norm",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log1p",
        "log2",
        "logsumexp",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "native_layer_norm",
        "nll_loss",
        "nll_loss2d",
        "norm",
        "nuclear_norm",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "reciprocal",
        "renorm",
        "rms_norm",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softplus",
        "tan",
        "triplet_margin_loss",
        # Made of these.
        "__pow__",
        "__rdiv__",
        "__rpow__",
        "__rtruediv__",
        "cross_entropy",
        "gumbel_softmax",
        "interpolate",
        "normalize",
        "softmin",
    }
)
"""Functions whose 16-bit operands are cast to float32."""
SUMMED_IN_FLOAT32 = frozenset(
    {
        "cumprod",
        "cumsum",
        "linalg_matrix_norm",
        "linalg_norm",
        "linalg_vector_norm",
        "log_softmax",
        "prod",
        "softmax",
        "sum",
    }
)
"""Functions that get ``dtype=torch.float32`` unless the call sets a dtype."""
IN_THE_WIDEST = frozenset(
    {
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "grid_sample",
        "grid_sampler",
        "index_put",
        "scatter_add",
        "tensordot",
        "vdot",
    }
)
"""Functions whose operands are cast to float32 if one of them has it."""
_16_BITS = (torch.bfloat16, torch.float16)


def autocast(module: nn.Module, dtype: torch.dtype) -> None:
    """Change `module` in place to run as under ``torch.autocast("cuda", dtype)``.

    A float32 leaf that requires a gradient is cast to 16 bits once per forward, and the cast is
    kept until the forward ends, as in torch's cache. A Python function composed of several
    operators, such as attention with its projections, runs in the dtype of the products.
    """
    forward = module.forward

    @wraps(forward)
    def forward_with_casts(*args: object, **kwargs: object) -> object:
        with _Autocast(dtype):
            return forward(*args, **kwargs)

    # On the module itself: a module around it would change the path of every other.
    module.forward = forward_with_casts


def with_own_regions(module: nn.Module) -> None:
    """Change `module` in place so that `torch.autocast` regions in its forward cast as on CUDA.

    Regions for the CPU are unchanged: on an accelerator they do nothing.
    """
    forward = module.forward

    @wraps(forward)
    def forward_with_regions(*args: object, **kwargs: object) -> object:
        with regions_of_cuda():
            return forward(*args, **kwargs)

    module.forward = forward_with_regions


@contextmanager
def regions_of_cuda() -> Iterator[None]:
    """Let regions of `torch.autocast` created or entered in the block cast as on CUDA.

    Without a GPU torch disables such regions on creation, and those of the device ``meta`` fail.
    Regions created earlier are enabled only if torch left them enabled. Not thread-safe.
    """
    names = ("__init__", "__enter__", "__exit__")
    originals = [getattr(torch.autocast, name) for name in names]
    make, enter, leave = originals

    def init(
        region: Any,  # noqa: ANN401 - a `torch.autocast`, with fields of ours
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        region.casts_to = (dtype or torch.get_autocast_dtype("cuda")) if enabled else None
        region.device = device_type
        if device_type != "meta":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*Disabling autocast")
                make(region, device_type, dtype, enabled, cache_enabled)

    def enter_region(region: Any) -> object:  # noqa: ANN401
        if region.device == "cpu":
            return enter(region)
        default_dtype = region.fast_dtype if getattr(region, "_enabled", False) else None
        mode = _Autocast(getattr(region, "casts_to", default_dtype))
        region.modes = [*getattr(region, "modes", ()), mode]
        mode.__enter__()
        return region

    def leave_region(region: Any, *error: Any) -> object:  # noqa: ANN401
        if region.device == "cpu":
            return leave(region, *error)
        region.modes.pop().__exit__(*error)
        return False

    ours: tuple[Callable[..., object], ...] = (init, enter_region, leave_region)
    for name, function in zip(names, ours, strict=True):
        setattr(torch.autocast, name, function)
    try:
        yield
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(torch.autocast, name, original)


class _Autocast(TorchFunctionMode):
    """Casts the operands of torch functions, by name; nested modes override outer ones."""

    _entered: ClassVar[list["_Autocast"]] = []

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Cast to `dtype` for products; None casts nothing, like a disabled region."""
        super().__init__()
        self._dtype = dtype
        # By `id` and dtype, with the leaf itself so that its id is not reused.
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> "_Autocast":
        """Become the innermost mode; casts of leaves are kept until the outermost exits."""
        self._casts = self._entered[0]._casts if self._entered else {}
        self._entered.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the enclosing mode."""
        self._entered.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what a function returns is anything
        named = dict(kwargs or {})
        if self._dtype is None or self._entered[-1] is not self:
            return func(*args, **named)
        name = getattr(func, "__name__", "")
        if name in IN_16_BITS:
            args, named = tree_map_only(Tensor, self._in_16_bits, (args, named))
        elif name in SUMMED_IN_FLOAT32:
            if _is_short(args, named) and not _has_dtype(args, named):
                named["dtype"] = torch.float32
        elif name in IN_FLOAT32 or (name in IN_THE_WIDEST and _has_float32(args, named)):
            args, named = tree_map_only(Tensor, _in_float32, (args, named))
        return func(*args, **named)

    def _in_16_bits(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype
        if dtype is None or tensor.dtype == dtype or tensor.dtype not in (torch.float32, *_16_BITS):
            return tensor
        if not _is_cached(tensor):
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self._casts:
            self._casts[key] = (tensor, tensor.to(dtype))
        return self._casts[key][1]


def _is_cached(tensor: Tensor) -> bool:
    is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    return is_leaf and tensor.dtype == torch.float32


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _16_BITS else tensor


def _tensors(*operands: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]


def _is_short(*operands: object) -> bool:
    return any(tensor.dtype in _16_BITS for tensor in _tensors(*operands)[:1])


def _has_float32(*operands: object) -> bool:
    return any(tensor.dtype == torch.float32 for tensor in _tensors(*operands))


def _has_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
