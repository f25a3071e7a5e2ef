"""A recommendation is as fast as the fastest of all combinations, on small models."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.recommend_everything import combinations, compare
from runner.config.schema import ModeConfig
from tests.runner.composed import TINY_LLAMA, read


@pytest.mark.parametrize("devices", ["1x80gb+2x24gb", "4x16gb"])
def test_no_combination_is_faster(devices: str, tmp_path: Path) -> None:
    cache = ("capture.use_cache=true", f"capture.cache_dir={tmp_path}")
    two_layers = (*TINY_LLAMA, *cache, "model.config.num_hidden_layers=2", f"devices={devices}")
    row = compare(replace(read(*two_layers), mode=ModeConfig("single", {})))
    assert row.fit > 1
    assert row.most_examples_per_s == row.examples_per_s


def test_training_combines_all_settings_by_hand() -> None:
    step = read(*TINY_LLAMA, "phase=training", "devices=1x16gb")
    # Four modes without a schedule; three schedules of stages and two of microbatches in turn.
    per_choice = 4 + 4 + 2
    assert len(list(combinations(step))) == per_choice * 4 * 2
