"""`rule_of`: look up the rule of an operator by name."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import fx

from fxpart.capture.batch_dim.call import Call, base_name
from fxpart.capture.batch_dim.layout import Layout
from fxpart.capture.batch_dim.rules.factories import constant, number, positions, random
from fxpart.capture.batch_dim.rules.indexing import (
    embedding,
    embedding_bag,
    gather,
    index,
    index_put,
    index_select,
)
from fxpart.capture.batch_dim.rules.neighbours import (
    along,
    attention,
    band,
    normalized,
    pad,
    softmax_backward,
    spatial,
)
from fxpart.capture.batch_dim.rules.per_example import backward, per_example, unknown
from fxpart.capture.batch_dim.rules.pointwise import (
    add,
    choice,
    divide,
    gradient,
    multiply,
    pointwise,
    same,
)
from fxpart.capture.batch_dim.rules.products import addmm, einsum, grouped_product, linear, matmul
from fxpart.capture.batch_dim.rules.reductions import (
    REDUCTIONS,
    batch_norm,
    batch_norm_backward,
    counted,
    dropout,
    loss,
    loss_backward,
    reduction,
)
from fxpart.capture.batch_dim.rules.views import (
    cat,
    gathered,
    item,
    repeated,
    scattered,
    select_backward,
    slice_backward,
    stack,
    view,
)
from fxpart.capture.batch_dim.views import VIEWS

__all__ = ["Rule", "rule_of"]

Rule: TypeAlias = Callable[[Call], list[Layout]]

_NAMES: tuple[tuple[Rule, str], ...] = (
    (repeated, "expand expand_as broadcast_to repeat tile"),
    (item, "getitem"),
    (cat, "cat concat concatenate"),
    (stack, "stack"),
    (select_backward, "select_backward"),
    (
        same,
        "all_reduce sum_gradient"
        " alias clone contiguous detach lift_fresh_copy _to_copy to type_as positive neg"
        " dropout_identity _conj conj resolve_conj",
    ),
    (gathered, "all_gather"),
    (scattered, "reduce_scatter"),
    (slice_backward, "slice_backward"),
    (band, "tril triu"),
    (
        pad,
        "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
        " replication_pad2d replication_pad3d",
    ),
    (add, "add sub rsub"),
    (multiply, "mul multiply"),
    (divide, "div divide true_divide"),
    (choice, "where masked_fill"),
    (
        gradient,
        "threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward"
        " hardtanh_backward leaky_relu_backward elu_backward hardswish_backward"
        " hardsigmoid_backward softplus_backward mish_backward log_sigmoid_backward"
        " logit_backward native_dropout_backward",
    ),
    (
        pointwise,
        "copy fill relu _prelu_kernel floor_divide __and__ __or__ __xor__ __lshift__ __rshift__",
    ),
    (matmul, "mm bmm mv dot vdot matmul outer"),
    (addmm, "addmm baddbmm addmv"),
    (linear, "linear"),
    (einsum, "einsum"),
    (counted, "histc bincount histogram"),
    (
        along,
        "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp"
        " cummax cummin sort argsort topk kthvalue diff flip roll",
    ),
    (softmax_backward, "_softmax_backward_data _log_softmax_backward_data"),
    (
        constant,
        "zeros ones full empty empty_strided new_zeros new_ones new_full new_empty"
        " new_empty_strided zeros_like ones_like full_like empty_like scalar_tensor",
    ),
    (positions, "arange linspace logspace eye tril_indices triu_indices"),
    (
        random,
        "rand randn randint randperm rand_like randn_like randint_like bernoulli normal uniform"
        " exponential multinomial",
    ),
    (dropout, "dropout native_dropout feature_dropout alpha_dropout"),
    (batch_norm, "batch_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm"),
    (
        batch_norm_backward,
        "native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward",
    ),
    (embedding, "embedding"),
    (embedding_bag, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    (index, "index"),
    (index_put, "index_put _index_put_impl"),
    (index_select, "index_select"),
    (gather, "gather take_along_dim scatter scatter_add"),
    (
        loss,
        "cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward nll_loss2d_forward mse_loss"
        " l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
        " kl_div soft_margin_loss",
    ),
    (
        loss_backward,
        "nll_loss_backward nll_loss2d_backward mse_loss_backward smooth_l1_loss_backward"
        " huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward",
    ),
    (grouped_product, "_grouped_mm grouped_mm_fallback grouped_mm_fallback_backward"),
    (
        spatial,
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"
        " max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d"
        " avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d"
        " _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
    ),
    (
        normalized,
        "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm"
        " instance_norm",
    ),
    (
        attention,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention"
        " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math",
    ),
    (per_example, "glu one_hot causal_softmax vocab_losses"),
)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(sorted(VIEWS), view),
    **dict.fromkeys(sorted(REDUCTIONS), reduction),
    **{name: rule for rule, names in _NAMES for name in names.split()},
}
_EXTREMES_OF_TWO = frozenset({"max", "min"})


def rule_of(node: fx.Node) -> Rule:
    """Return the rule of a call node, or `unknown`, which compares sizes, if there is none."""
    name, value = base_name(node), node.meta.get("val")
    if value is None or isinstance(
        value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float
    ):
        return number
    if name in _EXTREMES_OF_TWO and "other" in str(node.target):
        return pointwise
    if name in RULES:
        return RULES[name]
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return gradient if name.endswith("_backward") else pointwise
    return backward if name.endswith("_backward") else unknown
