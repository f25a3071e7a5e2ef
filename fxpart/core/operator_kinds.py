"""The kinds of operators that a compiler distinguishes when it generates kernels."""

__all__ = [
    "CASTS",
    "GATHERS",
    "NORMS",
    "POINTWISE",
    "REDUCING",
    "REDUCTIONS",
    "SCATTERS",
    "WINDOWS",
    "is_shrunk_loss",
    "operator_name",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names("""
    _to_copy abs add addcdiv addcmul arange batch_norm bitwise_and bitwise_not bitwise_or
    bitwise_xor cat ceil celu clamp clamp_max clamp_min clip clone constant_pad_nd contiguous
    copy cos div dropout elu embedding eq erf exp expand_copy expm1 fill flatten floor
    floor_divide full full_like gather ge gelu gelu_backward gt hardsigmoid hardsigmoid_backward
    hardswish hardswish_backward hardtanh hardtanh_backward index index_select isfinite isinf
    isnan le leaky_relu leaky_relu_backward lerp lift_fresh_copy log log1p logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul native_dropout
    native_dropout_backward ne neg new_ones new_zeros nll_loss_backward ones ones_like pad pow
    reciprocal relu relu6 remainder repeat reshape roll round rsqrt rsub scalar_tensor
    select_backward selu sigmoid sigmoid_backward sign silu silu_backward sin slice_backward
    softplus softplus_backward sqrt square stack sub tan tanh tanh_backward threshold
    threshold_backward to tril triu trunc type_as where zeros zeros_like __and__ __or__""")
WINDOWS = _names("""
    avg_pool2d max_pool2d max_pool2d_with_indices upsample_bicubic2d upsample_bilinear2d
    upsample_nearest2d""")
"""These read each element several times, so their input is materialized."""
SCATTERS = _names("index_copy index_put scatter slice_scatter select_scatter")
"""These write only some elements of their input, so readers of the whole do not fuse with them."""
CASTS = _names("_to_copy to type_as")
GATHERS = _names("embedding gather index index_select")
REDUCTIONS = _names("""
    adaptive_avg_pool2d all amax amin any argmax argmin linalg_vector_norm max mean min
    nll_loss_forward prod std sum var var_mean""")
NORMS = _names("""
    _batch_norm_with_update _fused_rms_norm _log_softmax _log_softmax_backward_data
    _native_batch_norm_legit _safe_softmax _softmax _softmax_backward_data group_norm layer_norm
    log_softmax native_batch_norm native_group_norm native_layer_norm rms_norm softmax""")
"""Reductions whose results are as large as their inputs."""
REDUCING = WINDOWS | GATHERS | REDUCTIONS | NORMS
"""These read elements several times, or out of storage order."""
_SHRUNK_LOSSES = _names("binary_cross_entropy mse_loss smooth_l1_loss soft_margin_loss")
# ``batch_norm`` is the inference variant, with running statistics; training calls other operators.


def operator_name(target: str) -> str:
    """Return the plain name of an operator's target, such as ``add`` for ``aten.add_.Tensor``."""
    name = target.split(".")[-2] if "." in target else target
    return name if name.endswith("__") else name.removesuffix("_")


def is_shrunk_loss(target: str) -> bool:
    """Return whether an operator is a loss that, reduced, keeps the storage of all its terms.

    Compiled, it stores only its result. See `keep_all_terms` of `fxpart.capture.calls`.
    """
    return operator_name(target) in _SHRUNK_LOSSES
