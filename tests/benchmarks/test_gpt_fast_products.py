"""The sum over the products of a token: equal layers are captured once."""

import json
from pathlib import Path

import pytest

from benchmarks.truth import gpt_fast, gpt_fast_products
from tests.benchmarks.test_gpt_fast import TINY, point


def test_a_few_layers_determine_the_time_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpt_fast.MODELS, "tiny", ("llama3_1_8b", TINY))
    (tmp_path / "measured.json").write_text(json.dumps([point()]))
    (row,) = gpt_fast_products.rows(tmp_path)
    whole = gpt_fast_products._graph("tiny", "bf16", 1, 5)
    assert 1 / row.predicted == pytest.approx(
        gpt_fast_products._times(whole)[whole.flops > 0].sum()
    )


def test_devices_share_layers_and_all_reduce_twice_per_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(gpt_fast.MODELS, "tiny", ("llama3_1_8b", TINY))
    # Each sum of 128 bytes takes the launch and a hop of NCCL on an A100, about 10 us.
    alone_s, split_s = (gpt_fast_products._token_s("tiny", "bf16", n) for n in (1, 2))
    assert split_s - alone_s == pytest.approx(10 * 10e-6, rel=0.2)
