"""Rules of normalizations by the batch's own statistics, and of dropout."""

from dataclasses import replace

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.placement import PARTIAL
from fxpart.batch_dim.rules.factories import RANDOM
from fxpart.batch_dim.rules.per_example import backward, per_example
from fxpart.batch_dim.rules.pointwise import same

__all__ = ["batch_norm", "batch_norm_backward", "dropout"]

STATISTICS = "is normalized by the statistics of one process's own examples"


def _trains(call: Call) -> bool:
    named = ("training", "train")
    return bool(next((call.arguments[name] for name in named if name in call.arguments), False))


def batch_norm(call: Call) -> list[Layout]:
    """Return the layouts of a batch normalization; in training its means are means of parts."""
    found = per_example(call)
    if not found[0].is_split:
        return found
    first = replace(found[0], dim=found[0].dim)
    if not _trains(call):
        return [first, *(Layout() for _ in found[1:])]
    mean, deviation = Layout(PARTIAL, scale=1), Layout(PARTIAL, differs=STATISTICS)
    return [replace(first, differs=STATISTICS), mean, deviation, Layout(), Layout()][: len(found)]


def batch_norm_backward(call: Call) -> list[Layout]:
    """Return the layouts of its gradients: what was saved of the forward is read as it is."""
    kept = [call.arguments.get(name) for name in ("save_mean", "save_invstd")]
    found = backward(call)
    call.reduced[:] = [node for node in call.reduced if node not in kept]
    if not _trains(call):
        return found
    return [
        replace(x, differs=STATISTICS) if sizes else x
        for x, sizes in zip(found, call.results, strict=True)
    ]


def dropout(call: Call) -> list[Layout]:
    """Return the layouts of a dropout: nothing happens by probability 0, nor out of training."""
    trains = call.arguments.get("train", call.arguments.get("training", True))
    if not trains or call.arguments.get("p") == 0:
        return [*same(call), *(Layout() for _ in call.results[1:])]
    found = per_example(call)
    return [replace(x, differs=RANDOM) if x.is_split else x for x in found]
