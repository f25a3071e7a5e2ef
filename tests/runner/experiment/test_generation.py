"""A generation on one placement, compared with runs of its steps and of its largest sizes."""

import csv
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fxpart.capture.models.architecture import has_encoder_and_decoder
from fxpart.core.graph import IntArray, OpGraph
from fxpart.errors import FxpartError, InfeasibleError, SpecError
from fxpart.placement.follow import follow
from runner.config.schema import Config
from runner.experiment.check import check_all
from runner.experiment.experiment import plan
from runner.experiment.generation import generation_lines
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from runner.experiment.runtime import _kept_kernels
from runner.experiment.serving_steps import serving_steps
from runner.job.serving_files import write_serving_files
from tests.runner.composed import read

_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}


def _overrides(*overrides: str, architecture: str = "LlamaForCausalLM") -> list[str]:
    return [
        "model=transformers",
        f"model.architecture={architecture}",
        *(f"+model.config.{key}={value}" for key, value in _SMALL.items()),
        "devices=1x0.2mb",
        "reserve=none",
        "mode=single",
        *overrides,
    ]


def _planned(*overrides: str, architecture: str = "LlamaForCausalLM") -> Result:
    config = read(*_overrides(*overrides, architecture=architecture))
    return plan(config, model_spec(config))


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def _lengths(prompt_len: int, output_len: int) -> tuple[str, ...]:
    return ("phase=generate", f"prompt_len={prompt_len}", f"output_len={output_len}")


def test_its_times_are_those_of_captures_of_each_step_at_one_size() -> None:
    sizes = ("model.batch_size=3", "devices=1x1gb", "model.config.num_hidden_layers=1")
    # Three tokens are sent to at most six of eight experts, which a symbolic batch cannot express.
    metrics = headline(_planned(*_lengths(20, 3), *sizes, architecture="MixtralForCausalLM"))

    def alone(*overrides: str) -> dict[str, float]:
        return headline(_planned(*sizes, *overrides, architecture="MixtralForCausalLM"))

    prefill = alone("phase=prefill", "model.seq_len=20")
    assert metrics["ttft_ms"] == pytest.approx(prefill["latency_ms"], rel=1e-9)
    first, second, last = (alone("phase=decode", f"context_len={n}") for n in (21, 22, 23))
    assert metrics["tpot_ms"] == pytest.approx(
        (first["latency_ms"] + second["latency_ms"]) / 2, rel=1e-4
    )
    total_s = (metrics["ttft_ms"] + 2 * metrics["tpot_ms"]) / 1e3
    assert metrics["tokens_per_s"] == pytest.approx(3 * 3 / total_s)
    assert metrics["examples_per_s"] == pytest.approx(3 / total_s)
    assert metrics["latency_ms"] == pytest.approx(last["latency_ms"], rel=1e-9)
    for same in ("kv_cache_gib", "peak_memory_gib", "weights_gib"):
        assert metrics[same] == last[same]


def test_prompts_in_turn_wait_for_each_other_and_need_less_memory() -> None:
    """Of six texts, the prompts of two are computed at once, beside the caches of all."""
    sizes = ("devices=1x1gb", "model.config.num_hidden_layers=1", "model.batch_size=6")
    metrics = headline(_planned(*_lengths(20, 3), *sizes, "prefill_batch=2"))

    def alone(*overrides: str) -> dict[str, float]:
        return headline(_planned(*sizes, *overrides))

    prefill = alone("phase=prefill", "model.seq_len=20", "model.batch_size=2", "context_len=23")
    decode_ms = sum(alone("phase=decode", f"context_len={n}")["latency_ms"] for n in (21, 22)) / 2
    assert metrics["ttft_ms"] == pytest.approx(prefill["latency_ms"], rel=1e-9)
    waited_ms = 2 * prefill["latency_ms"] / 2  # for two passes, over two tokens
    assert metrics["tpot_ms"] == pytest.approx(decode_ms + waited_ms, rel=1e-4)
    total_s = (3 * metrics["ttft_ms"] + 2 * decode_ms) / 1e3
    assert metrics["examples_per_s"] == pytest.approx(6 / total_s, rel=1e-4)
    others_gib = metrics["kv_cache_gib"] - prefill["kv_cache_gib"]
    assert others_gib == pytest.approx(metrics["kv_cache_gib"] * 4 / 6)
    needed_gib = prefill["device_memory_gib"] + others_gib
    assert metrics["device_memory_gib"] == pytest.approx(needed_gib, rel=1e-6)
    at_once = headline(_planned(*_lengths(20, 3), *sizes))
    assert at_once["device_memory_gib"] > metrics["device_memory_gib"]
    assert at_once["max_batch"] < metrics["max_batch"]
    as_many = headline(_planned(*_lengths(20, 3), *sizes, "prefill_batch=7"))
    for same in ("ttft_ms", "tpot_ms", "device_memory_gib", "max_context"):
        assert as_many[same] == at_once[same]


def test_replicas_generate_their_shares_of_the_texts_side_by_side() -> None:
    sizes = ("model.config.num_hidden_layers=1", "prefill_batch=2", "price_per_hour={h100: 2}")
    alone = headline(_planned(*_lengths(20, 3), *sizes, "devices=1xh100", "model.batch_size=4"))
    replicas = ("devices=3xh100", "data_parallel=3", "model.batch_size=12")
    table = "serving_sweep.batches=[12,24]"
    result = _planned(*_lengths(20, 3), *sizes, *replicas, table)
    metrics = headline(result)
    # Nothing is exchanged, so no device has memory for it.
    for same in ("ttft_ms", "tpot_ms", "max_context", "peak_memory_gib", "device_memory_gib"):
        assert metrics[same] == alone[same]
    for name in ("tokens_per_s", "examples_per_s", "devices_used", "kv_cache_gib", "max_batch"):
        assert metrics[name] == pytest.approx(3 * alone[name], rel=1e-12), name
    for name in ("price_per_million_tokens", "mfu_pct"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-12), name
    assert [row.pace.texts for row in result.other_sizes] == [12, 24]
    assert result.other_sizes[0].pace.tokens_per_s == metrics["tokens_per_s"]
    assert result.generation is not None
    lines = dict(generation_lines(result.generation, result.evaluation, ""))
    assert "3 tokens of 12 texts in" in lines["generate"]


def test_kernels_of_other_sizes_are_those_of_the_devices_used_and_not_remembered() -> None:
    overrides = (*_lengths(20, 3), "runtime=compiled")
    _kept_kernels.cache_clear()
    single, two = (headline(_planned(*overrides, f"devices={n}x1gb")) for n in (1, 2))
    assert (single["ttft_ms"], single["tpot_ms"]) == (two["ttft_ms"], two["tpot_ms"])
    assert single["latency_ms"] == two["latency_ms"]
    # The last decode as a whole, once or for each of two captures, and for two devices block by
    # block; none of the sizes that were tried for the limits.
    assert 2 <= _kept_kernels.cache_info().currsize <= 3


@pytest.mark.parametrize("reserve", ["reserve=none", "reserve=cuda"])
def test_the_reported_sizes_are_the_largest_that_fit(reserve: str) -> None:
    device = "devices=1x0.2mb" if reserve == "reserve=none" else "devices=1x650mb"
    texts = 2 if reserve == "reserve=none" else 700
    sizes = (reserve, device)
    result = _planned(*_lengths(20, 5), *sizes, f"model.batch_size={texts}").generation
    assert result is not None
    assert result.limits.batch > texts
    assert result.limits.context > 25
    _planned(*_lengths(20, result.limits.context - 20), *sizes, f"model.batch_size={texts}")
    with pytest.raises(InfeasibleError):
        _planned(*_lengths(20, result.limits.context - 19), *sizes, f"model.batch_size={texts}")
    _planned(*_lengths(20, 5), *sizes, f"model.batch_size={result.limits.batch}")
    with pytest.raises(InfeasibleError):
        _planned(*_lengths(20, 5), *sizes, f"model.batch_size={result.limits.batch + 1}")


def test_the_model_ends_a_context_that_memory_does_not() -> None:
    result = _planned(*_lengths(20, 5), "devices=1x1gb")
    assert result.generation is not None
    assert result.generation.limits.context == 4096
    assert (
        "4,096 (the model's longest)"
        in generation_lines(result.generation, result.evaluation, "")[1][1]
    )


_TIED_WITH_A_WINDOW = (
    "+model.config.use_sliding_window=true",
    "+model.config.sliding_window=64",
    "+model.config.max_window_layers=1",  # the first block attends to everything
    "model.config.max_position_embeddings=100000",
    "+model.config.tie_word_embeddings=true",
)
"""A Qwen2 captured once for two tests."""


def test_a_window_is_passed_on_the_way_to_the_longest_context() -> None:
    sizes = ("devices=1x0.3mb", *_TIED_WITH_A_WINDOW)

    def planned(output_len: int) -> Result:
        return _planned(*_lengths(20, output_len), *sizes, architecture="Qwen2ForCausalLM")

    result = planned(5).generation
    assert result is not None
    assert 64 < result.limits.context < 100000
    planned(result.limits.context - 20)
    with pytest.raises(InfeasibleError):
        planned(result.limits.context - 19)


@pytest.mark.parametrize("prompt_len", [100, 101])
def test_prompts_may_be_as_long_as_a_window_and_longer(prompt_len: int) -> None:
    """Its last layer keeps all tokens, the other one a window of 100."""
    window = ("+model.config.sliding_window=100", "+model.config.head_dim=8", "devices=1x1gb")
    layers = "+model.config.layer_types=[sliding_attention,full_attention]"
    config = (layers, "+model.config.pad_token_id=0")

    def metrics(*overrides: str) -> dict[str, float]:
        model = (*window, *config, *overrides)
        return headline(_planned(*model, architecture="Gemma3ForCausalLM"))

    prefill = metrics("phase=prefill", f"model.seq_len={prompt_len}")
    assert metrics(*_lengths(prompt_len, 3))["ttft_ms"] == pytest.approx(prefill["latency_ms"])


def test_both_steps_on_several_devices_share_the_places_of_weights() -> None:
    result = _planned(*_lengths(20, 5), "mode=equal_layers", "devices=2x0.2mb")
    metrics = headline(result)
    prefill = headline(
        _planned("phase=prefill", "model.seq_len=20", "mode=equal_layers", "devices=2x0.2mb")
    )
    assert metrics["ttft_ms"] == pytest.approx(prefill["latency_ms"], rel=0.02)
    assert all(use.weight_bytes and use.cache_bytes for use in result.evaluation.devices)


def test_the_head_of_tied_embeddings_stays_where_the_decode_has_it() -> None:
    sizes = ("mode=equal_layers", "devices=2x0.2mb", *_TIED_WITH_A_WINDOW)
    config = read(*_overrides(*_lengths(20, 5), *sizes, architecture="Qwen2ForCausalLM"))
    spec = model_spec(config)
    result = plan(config, spec)
    steps = serving_steps(config, spec)
    decode = steps.decode(1, 25)
    prompts = steps.prefill(1, 20, decode)
    placed = follow(decode, result.assignment, prompts)

    def device(homes: IntArray, graph: OpGraph, module: str) -> int:
        (home,) = {int(homes[op]) for op, path in enumerate(graph.modules) if path == module}
        return home

    for module, home in (("model.embed_tokens", 0), ("lm_head", 1)):
        assert device(result.assignment.device_of, decode, module) == home
        assert device(placed.device_of, prompts, module) == home


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("phase=generate",), "prompt_len=null must be a whole number, 1 or more"),
        (("phase=generate", "output_len=8"), "prompt_len=null must be a whole number, 1 or more"),
        (_lengths(20, 1), "output_len=1 must be a whole number, 2 or more"),
        (("phase=decode", "context_len=8", "output_len=8"), "add phase=generate"),
        (("phase=decode", "context_len=8", "prefill_batch=1"), "prefill_batch=1 applies to a gen"),
        ((*_lengths(20, 5), "prefill_batch=0"), "prefill_batch=0 must be 1 or more"),
        ((*_lengths(20, 5), "context_len=30"), "leave out context_len=30"),
        ((*_lengths(20, 5), "schedule=gpipe", "mode=pipeline"), "leave out schedule=gpipe"),
        ((*_lengths(20, 5), "capture.symbolic=batch"), "leave out capture.symbolic=batch"),
        (("serving_sweep.batches=[2]",), "not to phase=inference; add phase=generate"),
        ((*_lengths(20, 5), "serving_sweep.batches=[2,0]"), "has 0, which must be 1 or more"),
        ((*_lengths(20, 5), "serving_sweep.contexts=[5]"), "has 5, which must be 6 or more"),
        (
            (*_lengths(20, 5), "data_parallel=2", "devices=2x1gb", "serving_sweep.batches=[2,3]"),
            "serving_sweep.batches has 3, which data_parallel=2 does not divide",
        ),
        (
            (*_lengths(20, 5), "data_parallel=2", "expert_parallel=2", "devices=2x1gb"),
            "leave out data_parallel=2 beside expert_parallel=2, or use phase=prefill",
        ),
    ],
)
def test_lengths_without_a_generation_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(FxpartError, match=message):
        check_all(read(*_overrides(*overrides)))


def test_more_tokens_than_the_model_has_positions_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(FxpartError, match=r"set .* prompt_len \+ output_len .* 4096 or less"):
        _planned(*_lengths(4090, 10))
    monkeypatch.setattr(
        "runner.experiment.experiment.problem_of", None
    )  # before anything is placed
    longer = r"serving_sweep.contexts has 5000, .* 5000 tokens is more than the 4096 positions"
    with pytest.raises(SpecError, match=longer):
        _planned(*_lengths(20, 5), "serving_sweep.contexts=[64,5000]")


def test_prompts_have_the_requested_length_whatever_the_sequence_length() -> None:
    for prompt_len in (15, 20):  # the same number of tokens in all
        result = _planned(*_lengths(prompt_len, 25 - prompt_len)).generation
        assert result is not None
        assert result.prompt_len == prompt_len


def test_an_encoder_has_no_table_of_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _of("T5ForConditionalGeneration", _T5, *_lengths(6, 4), "serving_sweep.contexts=[9]")
    monkeypatch.setattr(
        "runner.experiment.experiment.problem_of", None
    )  # before anything is placed
    with pytest.raises(FxpartError, match="an encoder is captured at prompt_len only"):
        plan(config, model_spec(config))


_T5 = ("d_model=16", "d_kv=8", "d_ff=32", "num_layers=1", "num_heads=2", "vocab_size=64")
_STATE = ("hidden_size=16", "vocab_size=64", "state_size=4", "num_hidden_layers=1")


def _of(architecture: str, sizes: tuple[str, ...], *overrides: str) -> Config:
    return read(
        *("model=transformers", f"model.architecture={architecture}", "mode=single"),
        *(f"+model.config.{size}" for size in sizes),
        *("devices=1x0.1mb", "reserve=none", *overrides),
    )


@pytest.mark.parametrize(
    ("architecture", "sizes", "context_len"),
    # A decoder beside an encoder begins with one token.
    [("T5ForConditionalGeneration", _T5, 5), ("MambaForCausalLM", _STATE, 10)],
)
def test_prompts_of_one_length_are_captured_for_any_batch(
    architecture: str, sizes: tuple[str, ...], context_len: int
) -> None:
    def planned(*overrides: str) -> Result:
        config = _of(architecture, sizes, *overrides)
        return plan(config, model_spec(config))

    result = planned(*_lengths(6, 4), "model.batch_size=2")
    metrics = headline(result)
    steps = [
        headline(
            planned(
                *(f"phase={step}", f"context_len={length}"),
                *("model.seq_len=6", "model.batch_size=2"),
            )
        )
        for step, length in (("prefill", context_len), ("decode", context_len - 1))
    ]
    assert metrics["ttft_ms"] == pytest.approx(steps[0]["ttft_ms"])
    assert metrics["tpot_ms"] == pytest.approx(steps[1]["tpot_ms"])
    most = int(metrics["max_batch"])
    assert planned(*_lengths(6, 4), f"model.batch_size={most}").device_memory
    with pytest.raises(InfeasibleError):
        planned(*_lengths(6, 4), f"model.batch_size={most + 1}")


def test_prompts_of_an_encoder_need_the_same_memory_after_any_other_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def held(*output_lens: int) -> dict[int, int]:
        monkeypatch.setattr("runner.experiment.serving_steps._pieces", OrderedDict())
        sizes = {}
        for output_len in output_lens:
            config = _of("T5ForConditionalGeneration", _T5, *_lengths(6, output_len))
            steps = serving_steps(config, model_spec(config))
            prompts = steps.prefill(1, 6, steps.decode(1, 1 + output_len))
            sizes[output_len] = int(prompts.value_bytes.sum())
        return sizes

    assert held(4, 40) == held(40, 4)


_SOUND = (
    *(f"{part}_layers=1" for part in ("encoder", "decoder")),
    *(f"{part}_attention_heads=2" for part in ("encoder", "decoder")),
    *(f"{part}_ffn_dim=32" for part in ("encoder", "decoder")),
    *(f"{name}_token_id=0" for name in ("pad", "bos", "decoder_start")),
    *("d_model=16", "vocab_size=64", "num_mel_bins=8", "max_source_positions=30"),
    *("suppress_tokens=null", "begin_suppress_tokens=null"),
)


@pytest.mark.parametrize(
    ("architecture", "sizes", "is_text"),
    [
        ("T5ForConditionalGeneration", _T5, True),
        ("WhisperForConditionalGeneration", _SOUND, False),
    ],
)
def test_an_encoder_reads_text_or_sound_before_any_prefill_is_asked_for(
    architecture: str,
    sizes: tuple[str, ...],
    is_text: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.experiment.serving_steps._pieces", OrderedDict())
    config = _of(architecture, sizes, *_lengths(60, 4))
    assert serving_steps(config, model_spec(config)).reads_text is is_text


def test_a_model_without_a_symbolic_capture_is_explained_in_plain_words() -> None:
    config = read(
        *("model=transformers", "model.architecture=RwkvForCausalLM", "mode=single"),
        *(f"+model.config.{size}" for size in ("hidden_size=16", "vocab_size=64")),
        *("+model.config.num_hidden_layers=1", "devices=1x1mb", "reserve=none"),
        *_lengths(6, 4),
    )
    with pytest.raises(FxpartError, match=r"a decode once for all sizes, which RwkvForCausalLM"):
        plan(config, model_spec(config))


def test_a_table_of_sizes_agrees_with_single_runs(tmp_path: Path) -> None:
    sweep = ("serving_sweep.batches=[4,1]", "serving_sweep.contexts=[40,200]")
    result = _planned(*_lengths(20, 5), *sweep)
    rows = result.other_sizes
    assert [(row.context_len, row.pace.texts) for row in rows] == [
        *((40, 1), (40, 4)),
        *((200, 1), (200, 4)),
    ]
    assert [row.fits for row in rows] == [True, True, True, False]
    for row in rows[:3]:
        metrics = headline(
            run := _planned(*_lengths(row.context_len - 5, 5), f"model.batch_size={row.pace.texts}")
        )
        assert row.pace.ttft_s * 1e3 == metrics["ttft_ms"]
        assert row.pace.tpot_s * 1e3 == metrics["tpot_ms"]
        assert row.pace.tokens_per_s == metrics["tokens_per_s"]
        assert row.needed_bytes == round(run.device_memory[0].needed.expected)
    with pytest.raises(InfeasibleError):
        _planned(*_lengths(195, 5), "model.batch_size=4")

    write_serving_files(tmp_path, rows, "a plan")
    text = (tmp_path / "serving_sweep.txt").read_text().splitlines()
    assert len(text) == 4 + len(rows)
    assert max(map(len, text)) <= 80
    assert text[-1].endswith(" no")
    with (tmp_path / "serving_sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["fits"] for row in table] == ["True", "True", "True", "False"]
    svg = (tmp_path / "serving_sweep.svg").read_text()
    assert svg.count("does not fit</title>") == 2  # in each panel
    ElementTree.fromstring(svg)


_TIERED = ("devices=1x0.02mb+host1mb", "offload=prefetch")
"""The device holds two of the blocks, of some 7 kB each, and one for the block being computed."""


def test_a_generation_with_tiers_takes_the_times_of_its_steps_with_the_same_tiers() -> None:
    result = _planned(*_lengths(20, 3), *_TIERED)
    metrics, offloaded = headline(result), result.offloaded
    assert offloaded is not None
    assert metrics["streamed_gib"] > 0
    decodes = [
        headline(_planned("phase=decode", f"context_len={n}", *_TIERED)) for n in (21, 22, 23)
    ]
    assert metrics["tpot_ms"] == pytest.approx(
        (decodes[0]["latency_ms"] + decodes[1]["latency_ms"]) / 2, rel=1e-4
    )
    assert metrics["latency_ms"] == pytest.approx(decodes[2]["latency_ms"], rel=1e-9)
    prefill = headline(_planned("phase=prefill", "model.seq_len=20", "context_len=23", *_TIERED))
    assert metrics["ttft_ms"] == pytest.approx(prefill["latency_ms"], rel=1e-6)
    # Each step copies the blocks again, over PCIe 4.0 at the share that pinned memory reaches.
    assert metrics["tpot_ms"] / 1e3 > metrics["streamed_gib"] * 2**30 / (31.5e9 * 0.8)


def test_the_largest_sizes_with_tiers_can_be_planned_and_twice_as_much_cannot() -> None:
    tiered = (*("devices=1x0.024mb+host1mb", "offload=prefetch", "mode=size_based"),)
    planned = _planned(*_lengths(20, 5), *tiered)
    result = planned.generation
    assert result is not None
    most = result.in_tiers
    assert most is not None
    assert most.batch >= result.limits.batch >= 1
    assert most.context > result.limits.context >= 25
    lines = dict(generation_lines(result, planned.evaluation, ""))
    assert lines["most"].startswith("a plan with all in tiers that can lie there holds ")
    for texts, context in ((1, most.context), (most.batch, 25)):
        _planned(*_lengths(20, context - 20), *tiered, f"model.batch_size={texts}")
    for texts, context in ((1, 2 * most.context), (2 * most.batch, 25)):
        with pytest.raises(InfeasibleError):
            _planned(*_lengths(20, context - 20), *tiered, f"model.batch_size={texts}")


@pytest.mark.parametrize(
    "architecture",
    ["BartForCausalLM", "ProphetNetForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"],
)
def test_models_with_an_encoder_are_known_by_name_or_class(architecture: str) -> None:
    """The end of a decoder's name is enough, since importing its class takes long."""
    spec = replace(model_spec(read("model=gpt2")), architecture=architecture)
    steps = serving_steps(read("model=gpt2", *_lengths(4, 4)), spec)
    assert steps.has_encoder == has_encoder_and_decoder(architecture)


@pytest.mark.parametrize("batch_size", [32, 40])
def test_a_prompt_that_needs_far_more_than_its_tokens_is_spread_as_far_as_needed(
    batch_size: int,
) -> None:
    """The bytes that its first plan lacks are more than a device has for the tokens' plan."""
    config = read(
        "model=llama3_1_8b",
        "model.config.num_hidden_layers=2",
        *_lengths(1024, 128),
        *(f"model.batch_size={batch_size}", "devices=4x6gb", "mode=size_based"),
    )
    result = plan(config, model_spec(config))
    assert len({int(device) for device in result.assignment.device_of}) > 1
    assert all(need.verdict != "does not fit" for need in result.device_memory)
