"""FLOPs of fused attention on the CPU, which torch's own counter does not know."""

from collections.abc import Callable

from torch import Tensor, fx

__all__ = ["attention_flops"]


def _forward(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return 2 B H Sq Sk (D + Dv): scores, and their product with the values."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return 2 B H Sq Sk (3 D + 2 Dv): scores again, and gradients of all three and of them."""
    width = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * width


_FORMULAS: dict[str, tuple[int, Callable[..., int]]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (3, _forward),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (4, _backward),
}
"""Operator to how many tensors its formula takes, and the formula."""


def attention_flops(node: fx.Node) -> int | None:
    """Return the FLOPs of a call of fused attention, or None for any other call.

    All products are counted, also those that a mask makes vain: so does torch's counter for the
    attention of other devices.
    """
    known = _FORMULAS.get(str(node.target))
    if known is None:
        return None
    count, formula = known
    given = [leaf.meta["val"] for leaf in node.args[:count] if isinstance(leaf, fx.Node)]
    return int(formula(*given))
