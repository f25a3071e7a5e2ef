"""Tokens per second, MFU and prices, compared with sums by hand."""

from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.experiment.check import check
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.rates import price_per_hour, rate_line, unpriced_line
from tests.runner.composed import read

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_LAYER = 4 * 16 * 16 + 3 * 16 * 24
_PEAK = 312e12
"""Of an A100, in bfloat16."""


def _metrics(*overrides: str) -> dict[str, float]:
    config = read(
        "model=transformers",
        "model.architecture=LlamaForCausalLM",
        *(f"+model.config.{key}={value}" for key, value in (_SIZES | _HEADS).items()),
        "model.batch_size=4",
        "model.seq_len=8",
        "mode=single",
        *overrides,
    )
    return headline(plan(config, model_spec(config)))


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def _palm_flops(tokens: int, keys: int) -> int:
    """Return the FLOPs of a forward by PaLM's appendix B: 2 N + 4 L H Q T for each token."""
    return tokens * (2 * (2 * _LAYER + 16 * 32) + 4 * 2 * 16 * keys)


def test_a_training_step_counts_three_forwards_whatever_is_recomputed() -> None:
    metrics = _metrics("devices=1xa100_40gb", "phase=training", "checkpointing=block")
    step_s = metrics["latency_ms"] / 1e3
    share = 3 * _palm_flops(4 * 8, 8) / (_PEAK * step_s)
    assert metrics["mfu_pct"] == pytest.approx(share * 100)
    assert metrics["tokens_per_s"] == pytest.approx(4 * 8 / step_s)
    assert rate_line(metrics, trains=True).endswith(f", {metrics['mfu_pct']:.1f}% MFU")


def test_frozen_weights_have_no_products_for_their_gradients() -> None:
    pytest.importorskip("peft")
    lora = ("finetune=lora", "finetune.rank=4", "model.dtype=bfloat16")
    metrics = _metrics("devices=1xa100_40gb", "phase=training", *lora)
    adapters = 2 * (2 * 2 * 2 * 4 * 16)  # a multiply and an add; of q and v of two layers
    frozen = 2 * (2 * _LAYER + 16 * 32)
    attention = 4 * 2 * 16 * 8
    # peft keeps adapters in float32.
    busy_s = 4 * 8 * ((2 * frozen + 3 * attention) / _PEAK + 3 * adapters / 19.5e12)
    assert metrics["mfu_pct"] == pytest.approx(busy_s / (metrics["latency_ms"] / 1e3) * 100)


def test_replicas_groups_and_idle_devices_count_with_their_peaks() -> None:
    metrics = _metrics("devices=8xa100_40gb", "data_parallel=2", "tensor_parallel=2")
    assert metrics["devices_used"] == 4  # two of each replica, and four are idle
    per_s = metrics["examples_per_s"] * _palm_flops(8, 8)
    assert metrics["mfu_pct"] == pytest.approx(per_s / (8 * _PEAK) * 100)


def test_a_decode_makes_one_token_per_text_and_step() -> None:
    metrics = _metrics("devices=1xa100_40gb", "phase=decode", "context_len=8")
    step_s = metrics["latency_ms"] / 1e3
    assert metrics["mfu_pct"] == pytest.approx(_palm_flops(4, 8) / (_PEAK * step_s) * 100)
    assert rate_line(metrics, trains=False) == f"{4 / step_s:,.1f} tokens/s"
    # No stream: the next step needs these tokens, also on several devices.
    assert metrics["examples_per_s"] == metrics["tokens_per_s"]
    cut = _metrics("devices=2xa100_40gb", "phase=decode", "context_len=8", "mode=pipeline")
    assert cut["examples_per_s"] == cut["tokens_per_s"] == 4 / (cut["latency_ms"] / 1e3)


def test_a_price_counts_all_devices_and_is_per_token() -> None:
    prices = "price_per_hour={a100_40gb: 3, t4: 0.5}"
    metrics = _metrics("devices=2xa100_40gb+1xt4", prices)
    assert metrics["price_per_hour"] == 6.5
    per_token = 6.5 / 3600 / metrics["tokens_per_s"]
    assert metrics["price_per_million_tokens"] == pytest.approx(per_token * 1e6)
    assert metrics["price_per_million_examples"] == pytest.approx(per_token * 8e6)
    assert f"{per_token * 1e6:,.2f} USD per million tokens" in rate_line(metrics, trains=False)
    # Where one price is unknown, the sum is too.
    unknown = _metrics("devices=2xa100_40gb+1xt4", "price_per_hour={t4: 0.5}")
    assert not any(name.startswith("price") for name in unknown)
    config = read("devices=2xa100_40gb+1xt4", "price_per_hour={t4: 0.5}")
    assert unpriced_line(config) == "unknown, as price_per_hour has none of a100_40gb"
    assert not unpriced_line(read("devices=2xa100_40gb+1xt4", prices))
    assert not unpriced_line(read("devices=1xt4"))


def test_a_stream_of_decodes_makes_no_token_cheaper() -> None:
    pipeline = ("devices=2xa100_40gb", "mode=pipeline", "price_per_hour={a100_40gb: 3}")
    metrics = _metrics(*pipeline, "phase=decode", "context_len=8")
    per_token = 6 / 3600 / (4 / (metrics["latency_ms"] / 1e3))
    assert metrics["price_per_million_tokens"] == pytest.approx(per_token * 1e6)
    assert "price_per_million_examples" not in metrics
    shallow = "model.config.num_hidden_layers=1"  # captured with symbolic sizes: seconds a layer
    generated = _metrics(*pipeline, "phase=generate", "prompt_len=8", "output_len=5", shallow)
    assert generated["price_per_million_examples"] == pytest.approx(
        5 * generated["price_per_million_tokens"]
    )


def test_the_price_is_read_from_the_file_of_the_accelerator(folder: Path) -> None:
    own = folder / "conf" / "accelerator" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "memory: 8gb\nflops_per_s: {float32: 1e12}\nmemory_bandwidth_bytes_per_s: 1e11\n"
        "source: here\nprice_per_hour: 0.25\n"
    )
    assert price_per_hour(read("devices=4xmine")) == 1.0
    assert price_per_hour(read("devices=4xmine", "price_per_hour={mine: 1}")) == 4.0
    own.write_text(own.read_text().replace("0.25", "-1"))
    with pytest.raises(SpecError, match="price_per_hour must be a positive number, is -1"):
        read("devices=4xmine")


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ("{h10: 2}", "no accelerator 'h10', .*h100"),
        ("{h100: 0}", "h100 must be positive"),
        ("{h100: {a: 1}}", "h100 must be positive"),
    ],
)
def test_a_wrong_price_is_one_line(prices: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check(read("devices=1xh100", f"price_per_hour={prices}"))
