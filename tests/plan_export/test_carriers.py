import numpy as np
import pytest

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError
from fxpart.plan_export import carriers
from tests.plan_export.scene import named
from tests.sketch import Sketch


def _blocks(count: int) -> OpGraph:
    """Return a chain of blocks: a linear, another, and a residual sum in the block itself."""
    sketch = Sketch()
    value = sketch.input(1)
    for block in range(count):
        inner = value
        for name in ("up", "down"):
            inner = sketch.op([inner], 1, [sketch.weight(5)], 1, module=f"block.{block}.{name}")
        value = sketch.op([inner, value], 1, [], 1, module=f"block.{block}")
    names = [f"block.{block}.{name}.weight" for block in range(count) for name in ("up", "down")]
    return named(sketch.graph(value), *names)


def _plan(*partition_of: int, homes: list[int] | None = None) -> Assignment:
    count = max(partition_of) + 1
    devices = homes or list(range(count))
    return Assignment(np.array(partition_of), tuple((device,) for device in devices))


def test_whole_blocks_in_stages_are_executed_by_both() -> None:
    engines = carriers(_blocks(2), _plan(0, 0, 0, 1, 1, 1))
    assert engines.accelerate
    assert engines.pipelining
    assert (engines.torn, engines.elsewhere, engines.inside) == ((), 0, None)


def test_a_block_split_in_half_is_only_executed_by_pipelines() -> None:
    # The sum of the second block has its input on device 0 and its inner value on device 1.
    engines = carriers(_blocks(2), _plan(0, 0, 0, 0, 1, 1))
    assert engines.torn == ("block.1",)
    assert not engines.accelerate
    assert engines.pipelining


def test_a_stage_that_begins_inside_a_module_is_named() -> None:
    sketch = Sketch()
    value = sketch.input(1)
    for _ in range(4):
        value = sketch.op([value], 1, [], 1, module="net.body")
    engines = carriers(sketch.graph(value), _plan(0, 0, 1, 1))
    assert not engines.pipelining
    assert engines.inside == "net.body"


def test_partitions_that_are_not_consecutive_stages_are_no_pipeline() -> None:
    assert carriers(_blocks(3), _plan(0, 0, 0, 1, 1, 1, 2, 2, 2, homes=[0, 1, 0])).pipelining
    back = carriers(_blocks(3), _plan(0, 0, 0, 1, 1, 1, 2, 2, 2, homes=[0, 1, 1]))
    assert not back.pipelining
    assert back.inside == ""
    assert not carriers(_blocks(2), _plan(0, 1, 0, 2, 3, 2, homes=[0, 1, 0, 1])).pipelining


def test_replicas_are_refused() -> None:
    with pytest.raises(SpecError, match="partition 0 is on devices 0, 1"):
        carriers(_blocks(1), Assignment(np.zeros(3, dtype=np.int64), ((0, 1),)))
