"""`spread_experts`: expert parallelism, with whole experts per device and tokens sent to them.

As in transformers with an ``ep_plan`` and in Megatron-LM's all-to-all dispatcher, a device sends
each of its tokens to the devices of the experts chosen by the router, runs its own experts on the
tokens that it receives, and sends the results back to be weighted and summed (Lepikhin et al.:
GShard, ICLR 2021, arXiv:2006.16668). The rest of the model is replicated with separate tokens per
device, or split over tensor-parallel groups.

Devices of a tensor-parallel group see the same tokens. They divide them before sending
(``AllToAllEP``); or, if the group has all experts and nothing is trained, each device runs its own
experts on all tokens and the results are summed (``AllReduceEP``; vLLM's
``--enable-expert-parallel`` without data parallelism).
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpart.errors import NotApplicableError, nearest_degrees
from fxpart.sharding.collectives import all_reduce, process_group
from fxpart.sharding.tensor_plan import styles_of
from fxpart.sharding.token_rows import gather_rows, own_rows

__all__ = ["expert_paths", "spread_experts"]

_COUNTS, _ROWS = "fxpart::all_to_all.counts", "fxpart::all_to_all.rows"
_WHOLE_EXPERTS, _DISPATCH = "grouped_gemm", "ep_dispatch_experts"


def expert_paths(module: nn.Module) -> list[str]:
    """Return the expert modules of `module` according to its ``ep_plan``."""
    styles = styles_of(module, getattr(module, "ep_plan", None) or {})
    return [path for path, style in styles.items() if style == _DISPATCH]


def spread_experts(
    module: nn.Module,
    group: int,
    rank: int = 0,
    imbalance: float = 1.0,
    *,
    same_tokens: int = 1,
    trains: bool = True,
    megatron: bool = False,
) -> nn.Module:
    """Reduce `module` in place to the part on device `rank` of a group of `group`; return it.

    Args:
        module: a transformers model on any device, including meta; it is modified.
        group: number of devices in the group.
        rank: rank of the device.
        imbalance: ratio of the tokens that this device receives to its even share, if there are no
            values to route by; 1 for balanced routers.
        same_tokens: number of neighbours in the group with the same tokens: those of a
            tensor-parallel group, or 1 if each device has a piece of the tokens.
        trains: whether the module is used for training.
        megatron: whether rows of other devices' experts are not masked, unlike in transformers.

    Raises:
        NotApplicableError: if the model has no experts in an ``ep_plan``, or the group does not
            divide their number.

    """
    if group == 1:
        return module
    homes = expert_paths(module)
    if not homes:
        raise NotApplicableError(
            f"expert_parallel={group} spreads experts over devices, {type(module).__name__} has no "
            "plan for spreading experts (ep_plan); choose a mixture of experts, such as "
            "model=mixtral_8x7b, or set expert_parallel=1"
        )
    styles = styles_of(module, module.ep_plan)  # type: ignore[arg-type]
    for path in homes:
        experts: Any = module.get_submodule(path)
        count = int(experts.num_experts)
        if count % group:
            raise NotApplicableError(
                f"expert_parallel={group} must divide the {count} experts of {path}; use"
                f" {nearest_degrees(group, [count])}"
            )
        names = [n for n in experts._parameters if styles.get(f"{path}.{n}") == _WHOLE_EXPERTS]
        _keep_part(experts, names, group, rank)
        experts.num_experts = count // group
        experts._is_expert_parallel = not megatron
        if same_tokens == group and not trains:
            experts.forward = _Masked(experts, group, rank)
        else:
            experts.forward = _Dispatch(experts, group, imbalance, same_tokens)
    return module


def _keep_part(experts: nn.Module, names: Sequence[str], group: int, rank: int) -> None:
    """Reduce parameters that stack all experts to the experts of one device."""
    for name in names:
        whole = experts._parameters[name]
        if whole is not None:
            with torch.no_grad():
                local = torch.chunk(whole, group)[rank].clone()
            experts._parameters[name] = nn.Parameter(local, requires_grad=whole.requires_grad)


class _Masked:
    """The forward of one layer's experts on all tokens, like transformers' ``AllReduceEP``."""

    def __init__(self, experts: Any, group: int, rank: int) -> None:  # noqa: ANN401
        self.forward, self.count = experts.forward, int(experts.num_experts)
        self.group, self.rank = group, rank

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the result of `_Dispatch`, where all devices have the same tokens."""
        is_remote = (chosen // self.count) != self.rank
        local = torch.where(is_remote, self.count, chosen % self.count)
        part = self.forward(hidden, local, weights.masked_fill(is_remote, 0.0))
        return all_reduce(part, self.group).to(hidden.dtype)


class _Dispatch:
    """The forward of one layer's experts, following transformers' ``AllToAllEP``."""

    def __init__(self, experts: Any, group: int, imbalance: float, same_tokens: int) -> None:  # noqa: ANN401
        self.forward, self.count = experts.forward, int(experts.num_experts)
        self.group, self.imbalance, self.same_tokens = group, imbalance, same_tokens

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, shape (T, H).

        Args:
            hidden: tokens of this device. Shape (T, H).
            chosen: global indices of the experts of each token. Shape (T, K).
            weights: router weights of these experts. Shape (T, K).

        """
        received_rows, local, counts, order = self._sent(hidden, chosen)
        # Router weights are applied on the sending device.
        results = self.forward(
            received_rows, local, torch.ones_like(local, dtype=received_rows.dtype)
        )
        result = self._returned(results, self._own(weights), counts, order)
        if self.same_tokens > 1:
            result = gather_rows(result, len(hidden), self.same_tokens)
        return result.to(hidden.dtype)

    def _own(self, x: Tensor) -> Tensor:
        """Return the rows of `x` that this device sends, among those with the same tokens."""
        return x if self.same_tokens == 1 else own_rows(x, self.same_tokens)

    def _sent(
        self, hidden: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return the rows for this device's experts, the expert of each, and how to return them.

        The latter are the counts of rows sent and received, by device and expert, and the order in
        which (token, expert) pairs were sent.
        """
        pairs = chosen.numel()
        ids = self._own(chosen).reshape(-1)
        order = torch.argsort(ids)
        rows = self._own(hidden)[order // chosen.size(-1)]
        sent = torch.zeros(self.count * self.group, dtype=torch.long, device=hidden.device)
        sent = sent.scatter_add_(0, ids, torch.ones_like(ids)).view(self.group, self.count)
        received = torch.ops.fxpart.all_to_all.counts(sent, self.group)
        total = self._received(received, pairs)
        received_rows = torch.ops.fxpart.all_to_all.rows(rows, sent, received, total, self.group)
        local = torch.arange(self.count, device=hidden.device).repeat(self.group)
        local = local.repeat_interleave(received.reshape(-1), output_size=total).unsqueeze(-1)
        return received_rows, local, (sent, received), order

    def _returned(
        self, results: Tensor, weights: Tensor, counts: tuple[Tensor, Tensor], order: Tensor
    ) -> Tensor:
        sent, received = counts
        returned_rows = torch.ops.fxpart.all_to_all.rows(
            results, received, sent, len(order), self.group
        )
        outputs = torch.empty_like(returned_rows)
        outputs[order] = returned_rows
        outputs = outputs.view(*weights.shape, returned_rows.size(-1))
        return (outputs * weights.unsqueeze(-1)).sum(dim=1)

    def _received(self, received: Tensor, pairs: int) -> int:
        """Return the number of received rows, from the values of `received` if it has any."""
        if type(received) is Tensor and not received.is_meta:
            return int(received.sum())
        all_pairs = pairs * self.group // self.same_tokens
        return min(ceil(pairs * self.imbalance / self.same_tokens), all_pairs)


torch.library.define(_COUNTS, "(Tensor sent, int group) -> Tensor")
torch.library.define(
    _ROWS, "(Tensor x, Tensor sent, Tensor received, int total, int group) -> Tensor"
)


@torch.library.impl(_COUNTS, "CPU")
def _exchanged_counts(sent: Tensor, group: int) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=process_group(group))
    return received


def _counts_shape(sent: Tensor, group: int) -> Tensor:
    return torch.empty_like(sent)


@torch.library.impl(_ROWS, "CPU")
def _exchanged_rows(x: Tensor, sent: Tensor, received: Tensor, total: int, group: int) -> Tensor:
    """Return the rows sent to this device, in the order of the senders' ranks."""
    outputs = x.new_empty((total, *x.shape[1:]))
    counts = received.sum(dim=1).tolist(), sent.sum(dim=1).tolist()
    dist.all_to_all_single(outputs, x.contiguous(), *counts, group=process_group(group))
    return outputs


def _rows_shape(x: Tensor, sent: Tensor, received: Tensor, total: int, group: int) -> Tensor:
    return x.new_empty((total, *x.shape[1:]))


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    x, sent, received, _, group = inputs
    ctx.save_for_backward(sent, received)
    ctx.way_back = len(x), group


def _sent_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN401
    sent, received = ctx.saved_tensors
    rows = torch.ops.fxpart.all_to_all.rows(gradient, received, sent, *ctx.way_back)
    return rows, None, None, None, None


torch.library.register_fake(_COUNTS, _counts_shape)
torch.library.register_fake(_ROWS, _rows_shape)
torch.library.register_autograd(_ROWS, _sent_back, setup_context=_keep_counts)
