"""Values that a checkpointed block holds to recompute itself: by hand and on random graphs."""

from hypothesis import given
from hypothesis import strategies as st

from fxpart.capture.training.step_graph import with_block_lifetimes
from tests.sketch import Sketch, random_graph


def _block() -> Sketch:
    """Operator 1 computes the block's input, 2 and 3 are the block, 5 and 6 repeat it, then back.

    The block is a sum of its first operator's result and its input.
    """
    sketch = Sketch()
    x = sketch.input(1)
    given_ = sketch.op([x], 8)
    first = sketch.op([given_], 16)
    result = sketch.op([first, given_], 8)
    gradient = sketch.op([result], 8)
    again = sketch.op([given_], 16, backward_of=1)
    total = sketch.op([again, given_], 8, backward_of=2)
    back = sketch.op([gradient, total], 8, backward_of=2)
    sketch.op([back, again], 8, backward_of=1)
    return sketch


_AGAIN = [None] * 4 + [0, 0, None, None]


def test_the_input_is_held_for_the_formula_of_its_first_reader() -> None:
    graph = _block().graph(1)
    extended = with_block_lifetimes(graph, _AGAIN, [None] * 6 + [0, 0])
    given_, result = graph.reads_of(1).tolist()[0], graph.reads_of(6).tolist()
    # Operators 5 and 6 are partners of 1 and 2, and of their groups; the input is no transfer.
    assert extended.reads_of(7).tolist() == [*graph.reads_of(7).tolist(), given_]
    assert extended.reads_of(6).tolist() == [*result, given_]
    # Recomputed values are dropped after their last reader.
    assert [extended.reads_of(op).tolist() for op in range(6)] == [
        graph.reads_of(op).tolist() for op in range(6)
    ]


def test_a_formula_that_saved_nothing_holds_nothing() -> None:
    graph = _block().graph(1)
    extended = with_block_lifetimes(graph, _AGAIN, [None] * 6 + [0, None])
    assert extended.reads_of(7).tolist() == graph.reads_of(7).tolist()
    assert extended.reads_of(6).tolist() != graph.reads_of(6).tolist()


def test_another_run_of_the_block_holds_nothing() -> None:
    graph = _block().graph(1)
    extended = with_block_lifetimes(graph, _AGAIN, [None] * 6 + [1, 1])
    assert extended.reads.tolist() == graph.reads.tolist()


@given(st.integers(0, 10**6))
def test_only_the_last_formula_of_a_group_reads_more(seed: int) -> None:
    graph = random_graph(seed, 40)
    again = [op % 2 if op < 25 else None for op in range(40)]
    saving = [op // 2 % 2 if op >= 25 else None for op in range(40)]
    extended = with_block_lifetimes(graph, again, saving)
    group, producer = graph.group.tolist(), graph.value_producer.tolist()
    for op in range(40):
        more = {
            value
            for reader in range(25)
            if group[reader] == group[op] and again[reader] == saving[op]
            for value in graph.reads_of(reader).tolist()
            if producer[value] < 0 or again[producer[value]] != again[reader]
        }
        later = [o for o in range(op + 1, 40) if (group[o], saving[o]) == (group[op], saving[op])]
        before = graph.reads_of(op).tolist()
        expected = set(before) if saving[op] is None or later else more | set(before)
        assert extended.reads_of(op).tolist()[: len(before)] == before
        assert set(extended.reads_of(op).tolist()) == expected
