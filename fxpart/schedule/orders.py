"""Pipeline schedules: the order in which each device runs the forwards and backwards of a step.

With p devices, stage s is on device s modulo p, as in torch.distributed.pipelining.
"""

from collections.abc import Callable
from typing import NamedTuple

from fxpart.errors import NotApplicableError, SpecError, nearest_names

__all__ = ["MOST_ACTIONS", "SCHEDULES", "Action", "Order", "ordered_actions"]

MOST_ACTIONS = 2**20
"""Most forwards of a simulated step, since each is an object in memory."""


class Action(NamedTuple):
    """A forward or backward of one stage for one microbatch."""

    kind: str
    """``F`` for forward or ``B`` for backward."""
    microbatch: int
    stage: int


Order = Callable[[int, int, int, int], list[Action]]
"""Maps (device, devices, stages per device, microbatches) to the actions of the device."""


def _gpipe(device: int, devices: int, chunks: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards.

    Huang et al.: GPipe: efficient training of giant neural networks using pipeline parallelism.
    NeurIPS 2019, arXiv:1811.06965. For 2 devices and 3 microbatches::

        0: F0 F1 F2          B0 B1 B2
        1:    F0 F1 F2 B0 B1 B2
    """
    _refuse_chunks("gpipe", devices, chunks)
    return [Action(kind, i, device) for kind in "FB" for i in range(microbatches)]


def _one_forward_one_backward(
    device: int, devices: int, chunks: int, microbatches: int
) -> list[Action]:
    """Alternate forwards and backwards after as few forwards as keep all devices busy.

    Narayanan et al.: PipeDream: generalized pipeline parallelism for DNN training. SOSP 2019,
    doi:10.1145/3341301.3359646; without its weight versions. For 2 devices and 3 microbatches, of
    which at most 2 - d are in flight on device d::

        0: F0 F1    B0 F2    B1    B2
        1:    F0 B0 F1 B1 F2 B2
    """
    _refuse_chunks("1f1b", devices, chunks)
    ahead = min(microbatches, devices - 1 - device)
    forwards = [Action("F", i, device) for i in range(microbatches)]
    backwards = [Action("B", i, device) for i in range(microbatches)]
    return _in_turn(forwards, backwards, ahead)


def _interleaved(device: int, devices: int, chunks: int, microbatches: int) -> list[Action]:
    """``1f1b`` with several stages per device, which shrinks the bubble.

    Narayanan et al.: Efficient large-scale language model training on GPU clusters using
    Megatron-LM. SC 2021, doi:10.1145/3458817.3476209. A device runs a round of microbatches, as
    many as there are devices, through one of its stages, then through the next. If the number of
    microbatches is not a multiple of the devices, rounds are longer, as in torch.

    Raises:
        NotApplicableError: if the microbatches cannot be divided into equal rounds.

    """
    rounds = max(1, microbatches // devices)
    if microbatches % rounds:
        nearest = microbatches - microbatches % devices
        raise NotApplicableError(
            f"schedule=interleaved over {devices} devices runs microbatches in {rounds} equal "
            f"rounds, got microbatches={microbatches}; use {nearest} or {nearest + devices}"
        )
    round_size, total = microbatches // rounds, microbatches * chunks

    def action(kind: str, step: int) -> Action:
        turn, place = divmod(step, round_size)
        rounds_done, chunk = divmod(turn, chunks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(kind, rounds_done * round_size + place, chunk * devices + device)

    ahead = min(total, (chunks - 1) * round_size + 2 * (devices - 1 - device))
    forwards = [action("F", step) for step in range(total)]
    return _in_turn(forwards, [action("B", step) for step in range(total)], ahead)


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return the first `ahead` forwards, alternating forwards and backwards, then the backwards."""
    pairs = zip(forwards[ahead:], backwards[: len(forwards) - ahead], strict=True)
    middle = [action for pair in pairs for action in pair]
    return [*forwards[:ahead], *middle, *backwards[len(forwards) - ahead :]]


def _refuse_chunks(name: str, devices: int, chunks: int) -> None:
    if chunks > 1:
        raise NotApplicableError(
            f"schedule={name} runs one stage on each device, but the placement has "
            f"{chunks * devices} stages on {devices} devices; take schedule=interleaved, or a mode "
            "that places one stage on each: mode=pipeline, or mode=equal_layers, with "
            "mode.interleave=1"
        )


SCHEDULES: dict[str, Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
}
"""Order of one device by name of the schedule; `ordered_actions` covers all devices."""


def ordered_actions(
    name: str, devices: int, chunks: int, microbatches: int, *, training: bool
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each of `devices` devices, with `chunks` stages each, in order.

    Inference has only the forwards.

    Raises:
        SpecError: if the schedule does not exist, or there is no microbatch or too many actions.
        NotApplicableError: if a schedule for one stage per device gets several, or ``interleaved``
            cannot divide the microbatches.

    """
    if name not in SCHEDULES:
        raise SpecError(f"schedule={name} does not exist; {nearest_names(name, SCHEDULES)}")
    if microbatches < 1:
        raise SpecError(f"microbatches must be at least 1, got {microbatches}")
    if devices * chunks * microbatches > MOST_ACTIONS:
        raise SpecError(
            f"microbatches={microbatches} on {devices * chunks} stages make "
            f"{devices * chunks * microbatches} forwards, but at most {MOST_ACTIONS} are "
            f"simulated; use at most {MOST_ACTIONS // (devices * chunks)} microbatches"
        )
    order = SCHEDULES[name]
    rows = (order(device, devices, chunks, microbatches) for device in range(devices))
    kinds = "FB" if training else "F"
    return tuple(tuple(action for action in row if action.kind in kinds) for row in rows)
