"""A small model with two halves, for cuts at several depths."""

from fxpart.core.graph import OpGraph
from tests.sketch import Sketch


def encoder_decoder() -> OpGraph:
    """Return the operators of an encoder and a decoder in order, one time unit each."""
    sketch = Sketch()
    value = sketch.input(1)
    for module in ("emb", "enc.block.0", "enc.block.1.mlp", "enc.norm", "dec.block.0", "dec.norm"):
        value = sketch.op([value], 1, [sketch.weight(10)], 1, module=module)
    return sketch.graph(value)
