"""Blocks to recompute: against all choices, and the linear program by HiGHS."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from fxpart.cost.recomputation import BlockCost, chosen_blocks, least_again_s

COSTS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=6)


def _blocks(costs: Sequence[tuple[int, int]]) -> list[BlockCost]:
    return [BlockCost(f"h.{i}", float(s), freed) for i, (s, freed) in enumerate(costs)]


def _choice(blocks: Sequence[BlockCost], missing_bytes: int) -> tuple[str, ...]:
    freed = {block.name: block.freed_bytes for block in blocks}
    return chosen_blocks(blocks, lambda names: sum(freed[n] for n in names) >= missing_bytes)


def _seconds(blocks: Sequence[BlockCost], names: Sequence[str]) -> float:
    return sum(block.again_s for block in blocks if block.name in names)


def _best_s(blocks: Sequence[BlockCost], missing_bytes: int) -> float:
    """Return the minimum time of all choices that free enough."""
    choices = [c for n in range(len(blocks) + 1) for c in combinations(blocks, n)]
    enough = [c for c in choices if sum(block.freed_bytes for block in c) >= missing_bytes]
    return min(sum(block.again_s for block in choice) for choice in enough)


def test_by_hand() -> None:
    # 1, 2 and 0.5 s per byte; 12 bytes are the third's 10 and two of the first's four.
    blocks = _blocks([(4, 4), (8, 4), (5, 10)])
    assert _choice(blocks, 12) == ("h.0", "h.2")
    assert least_again_s(blocks, 12) == 5 + 4 * 2 / 4
    assert least_again_s(blocks, 0) == 0.0
    assert least_again_s(blocks, 19) == float("inf")
    # The last one frees nothing.
    assert least_again_s(_blocks([(5, 10), (1, 0)]), 12) == float("inf")


@given(COSTS, st.floats(0.01, 1.0))
def test_the_bound_and_the_choice_enclose_the_optimum(
    costs: list[tuple[int, int]], part: float
) -> None:
    blocks = _blocks(costs)
    missing_bytes = max(1, int(part * sum(freed for _, freed in costs)))
    chosen_s = _seconds(blocks, _choice(blocks, missing_bytes))
    bound_s, best_s = least_again_s(blocks, missing_bytes), _best_s(blocks, missing_bytes)
    assert bound_s <= best_s * (1 + 1e-9)
    assert best_s <= chosen_s
    # Blocks within a tenth of each other are chosen in model order; apart from that, at most one
    # block more than the linear program chooses entirely.
    assert chosen_s <= 1.1 * bound_s + max(block.again_s for block in blocks)
    seconds, freed = np.array(costs, dtype=np.float64).T
    program = linprog(seconds, A_ub=[-freed], b_ub=[-missing_bytes], bounds=(0, 1))
    assert program.fun == pytest.approx(bound_s)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.floats(0.01, 1.0))
def test_no_more_equal_blocks_than_necessary_are_recomputed(
    s: int, freed: int, n: int, part: float
) -> None:
    blocks = _blocks([(s, freed)] * n)
    missing_bytes = max(1, int(part * n * freed))
    names = _choice(blocks, missing_bytes)
    assert _seconds(blocks, names) == _best_s(blocks, missing_bytes)
    assert names == tuple(block.name for block in blocks[: len(names)])
