"""``checkpointing=budget`` compared with every choice of blocks of a small model."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fxpart.cost.recomputation import block_costs
from fxpart.errors import InfeasibleError, NotApplicableError
from runner.config.schema import Config
from runner.experiment.budget import within_budget
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import shared_subject
from tests.runner.composed import read

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
RESNET = {
    "depths": "[2]",
    "hidden_sizes": "[16]",
    "embedding_size": 8,
    "layer_type": "basic",
}
LAYERS = ("model.layers.0", "model.layers.1")


def _config(folder: Path, *overrides: str) -> Config:
    return _step(folder, "LlamaForCausalLM", LLAMA, "model.seq_len=64", *overrides)


def _step(folder: Path, architecture: str, sizes: Mapping[str, object], *overrides: str) -> Config:
    return read(
        "model=transformers",
        f"model.architecture={architecture}",
        *(f"+model.config.{name}={value}" for name, value in sizes.items()),
        "model.batch_size=4",
        "phase=training",
        "mode=single",
        "reserve=none",
        "capture.use_cache=true",
        f"capture.cache_dir={folder}",
        *overrides,
    )


def _planned(config: Config) -> tuple[int, float]:
    """Return the bytes at the peak and the time of the step."""
    evaluation = plan(config, model_spec(config), advises=False).evaluation
    return evaluation.peak_bytes, evaluation.latency_s


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of captures that these tests share."""
    return tmp_path_factory.mktemp("captures")


def test_the_fewest_blocks_with_which_a_step_fits(captures: Path) -> None:
    none = _planned(_config(captures, "devices=1x1gb"))
    block = "checkpointing=block"
    known = {
        chosen: _planned(
            _config(captures, "devices=1x1gb", block, f"recomputed_blocks={[*chosen]}")
        )
        for n in (1, 2)
        for chosen in combinations(LAYERS, n)
    }
    assert known[LAYERS] == _planned(_config(captures, "devices=1x1gb", block))
    least, most = known[LAYERS][0], none[0]
    for peak_bytes in (least, (least + most) // 2, most):
        config = _config(captures, f"devices=1x{peak_bytes / 1e6}mb", "checkpointing=budget")
        chosen, line = within_budget(config)
        fitting = {(): none} | known
        best_s = min(step_s for peak, step_s in fitting.values() if peak <= peak_bytes)
        planned = fitting[tuple(chosen.recomputed_blocks)]
        assert planned[0] <= peak_bytes
        assert planned[1] == pytest.approx(best_s)
        assert ("gap" in line) is (peak_bytes < most)
    config = _config(captures, f"devices=1x{(least - 1000) / 1e6}mb", "checkpointing=budget")
    with pytest.raises(InfeasibleError):
        within_budget(config)
    with pytest.raises(NotApplicableError, match="is decided before a plan is made"):
        plan(config, model_spec(config))


def test_blocks_within_a_stage(tmp_path: Path) -> None:
    def step(*overrides: str) -> Config:
        return _step(tmp_path, "ResNetForImageClassification", RESNET, *overrides)

    kept, again = step("devices=1x1gb"), step("devices=1x1gb", "checkpointing=block")
    layers = [f"resnet.encoder.stages.0.layers.{number}" for number in (0, 1)]
    least = _planned(again)[0]
    chosen, _ = within_budget(step(f"devices=1x{least / 1e6}mb", "checkpointing=budget"))
    assert chosen.recomputed_blocks == layers
    assert _planned(chosen)[0] == least
    # No block that frees memory is left out: together they free as much as all blocks.
    graph = shared_subject(kept, model_spec(kept)).captured.graph
    unchanged = (graph, np.ones(graph.n_ops))
    costs = block_costs(layers, unchanged, unchanged)
    assert [(cost.name, cost.freed_bytes) for cost in costs] == [(path, 0) for path in layers]


def test_no_gap_is_reported_where_states_make_room_too(captures: Path) -> None:
    beside = ("offload.optimizer=all", "offload.activations=none")

    def peak_bytes(*overrides: str) -> int:
        config = _config(captures, *beside, "devices=1x1gb+host1gb", *overrides)
        evaluation = plan(config, model_spec(config), advises=False).evaluation
        return evaluation.devices[0].peak_bytes

    half = (peak_bytes() + peak_bytes("checkpointing=block")) // 2
    devices = f"devices=1x{half / 1e6}mb+host1gb"
    _, line = within_budget(_config(captures, *beside, devices, "checkpointing=budget"))
    assert "1 of 2 blocks recomputed" in line
    assert "at least" not in line
