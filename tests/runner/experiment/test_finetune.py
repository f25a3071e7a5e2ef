"""A fine-tuning step has gradients and states of its adapters alone, as peft's own step has."""

import sys
import warnings
from pathlib import Path

import pytest

from fxpart.core.few_bits import WeightFormat
from fxpart.errors import FxpartError
from runner.experiment.check import check_all
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from tests.runner.composed import read

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _overrides(*overrides: str) -> list[str]:
    return [
        "model=transformers",
        "model.architecture=LlamaForCausalLM",
        *(f"+model.config.{key}={value}" for key, value in _SMALL.items()),
        "model.dtype=bfloat16",
        "model.batch_size=2",
        "model.seq_len=16",
        "phase=training",
        "devices=1x1gb",
        "reserve=none",
        "mode=single",
        *overrides,
    ]


def _planned(*overrides: str) -> Result:
    config = read(*_overrides(*overrides))
    return plan(config, model_spec(config))


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_only_adapters_have_gradients_and_states() -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    graph = _planned("finetune=lora", "finetune.rank=4").captured.graph
    model = LlamaForCausalLM(LlamaConfig.from_dict(_SMALL)).to(torch.bfloat16)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    tokens = torch.randint(0, 96, (2, 16))
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    trained = [weight for weight in tuned.parameters() if weight.grad is not None]
    assert len(graph.gradient_values) == len(trained) == 8
    gradient_bytes = sum(weight.grad.nbytes for weight in trained)
    assert graph.weight_bytes[graph.gradient_weights].sum() == gradient_bytes
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    kept = (t for state in optimizer.state.values() for t in state.values() if t.dim())
    assert graph.weight_state_bytes.sum() == pytest.approx(sum(t.nbytes for t in kept), rel=0.01)
    frozen = sum(weight.nbytes for weight in tuned.parameters() if not weight.requires_grad)
    frozen += sum(buffer.nbytes for buffer in tuned.buffers())
    assert graph.weight_bytes.sum() - gradient_bytes == frozen


def test_frozen_weights_on_the_host_are_copied_with_embeddings_and_head() -> None:
    pytest.importorskip("peft")
    on_host = ("devices=1x1gb+host1gb", "offload.weights=all")
    result = _planned("finetune=lora", "finetune.rank=4", *on_host)
    assert result.offloaded is not None
    assert result.evaluation.devices[0].weight_bytes == 0
    graph = result.captured.graph
    trained = graph.weight_bytes[graph.gradient_weights].sum()
    assert result.offloaded.frozen_bytes == graph.weight_bytes.sum() - trained


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_step_of_adapters_holds_what_pefts_own_run_holds() -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from fxpart.capture.live_bytes import LiveBytes, storage_sizes

    sizes = ("model.batch_size=4", "model.seq_len=64", "model.dtype=float32", "optimizer=none")
    (planned,) = _planned("finetune=lora", "finetune.rank=4", *sizes).evaluation.devices
    model = LlamaForCausalLM(LlamaConfig.from_dict({**_SMALL, "use_cache": False}))
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    tokens = torch.randint(0, 96, (4, 64))
    resident = storage_sizes([*tuned.parameters(), *tuned.buffers(), tokens])
    with LiveBytes([resident]) as counter:
        tuned(input_ids=tokens, labels=tokens).loss.backward()
    assert planned.peak_bytes == pytest.approx(counter.peak_bytes[0], rel=0.005)


@pytest.mark.parametrize("weights", ["none", "nf4"])
@pytest.mark.parametrize(("zero", "sharded"), [(0, False), (1, False), (2, True), (3, True)])
def test_replicas_shard_frozen_weights_too(zero: int, sharded: bool, weights: str) -> None:
    pytest.importorskip("peft")
    tuned = ("finetune=lora", f"weights={weights}")
    alone = _planned(*tuned, "model.batch_size=1")
    result = _planned(*tuned, "devices=2x1gb", "data_parallel=2", f"zero={zero}")
    share = 2 if sharded else 1
    sizes = alone.captured.graph.weight_bytes
    assert result.captured.graph.weight_bytes == pytest.approx(sizes / share, abs=32)
    state, whole = (r.captured.graph.weight_state_bytes.sum() for r in (result, alone))
    trained = sizes[alone.captured.graph.gradient_weights].sum()
    buckets = trained if zero < 2 else 0  # of DistributedDataParallel
    assert state == pytest.approx(whole / (2 if zero else 1) + buckets, rel=0.01)
    # The first line is that of the whole model.
    assert result.subject_line.split(",")[1:3] == alone.subject_line.split(",")[1:3]
    if zero == 1:  # only updated weights are gathered after a step
        assert result.shards is not None
        assert result.shards.collective_bytes == trained


def test_sharded_steps_of_adapters_have_the_mfu_of_whole_ones() -> None:
    pytest.importorskip("peft")
    both = ("finetune=lora", "devices=2x1gb", "data_parallel=2")
    products = []
    for zero in (0, 2, 3):
        result = _planned(*both, f"zero={zero}")
        values = headline(result)
        products.append(values["mfu_pct"] * values["latency_ms"])
        if zero:
            assert result.peaks[0].by_kind["gathered weight"] > 0
    assert products[1:] == pytest.approx([products[0]] * 2)


def test_shards_of_adapters_need_replicas_of_one_device() -> None:
    pytest.importorskip("peft")
    stages = ("devices=4x1gb", "data_parallel=2", "mode=pipeline", "schedule=1f1b")
    with pytest.raises(FxpartError, match="finetune=lora freezes most; use replicas of one device"):
        _planned("finetune=lora", "zero=3", "microbatches=2", "model.batch_size=4", *stages)


def test_adapters_may_keep_the_dtype_of_the_model() -> None:
    pytest.importorskip("peft")
    sizes = []
    for casts in (True, False):
        graph = _planned("finetune=lora", f"finetune.autocast_adapter_dtype={casts}").captured.graph
        sizes.append(int(graph.weight_bytes[graph.gradient_weights].sum()))
    assert sizes[0] == 2 * sizes[1]


def test_layers_that_take_no_adapter_are_explained_in_plain_words() -> None:
    pytest.importorskip("peft")
    experts = ("model.architecture=MixtralForCausalLM", "+model.config.num_local_experts=4")
    with pytest.raises(FxpartError, match=r"name layers, such as finetune.targets=\[q_proj"):
        _planned("finetune=lora", *experts)
    with pytest.raises(FxpartError, match=r"mlp\.\S+ belong to experts or their router, not to a"):
        _planned("finetune=lora", "finetune.targets=[all-linear]", *experts)


def test_a_misspelt_layer_is_refused_with_the_nearest_names() -> None:
    pytest.importorskip("peft")
    with pytest.raises(FxpartError, match=r"has q_prj, which is no layer .*; nearest: q_proj"):
        _planned("finetune=lora", "finetune.targets=[v_proj,q_prj]")


def test_rank_and_dropout_are_blamed_one_by_one() -> None:
    with pytest.raises(FxpartError, match=r"^finetune.rank=0 must be 1 or more$"):
        check_all(read(*_overrides("finetune=lora", "finetune.rank=0")))
    with pytest.raises(FxpartError, match=r"^finetune.dropout=1.0 must be at least 0 and below"):
        check_all(read(*_overrides("finetune=lora", "finetune.dropout=1.0")))


def test_corrections_by_peft_give_no_warning() -> None:
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from transformers import GPT2Config, GPT2LMHeadModel

    from fxpart.capture.models.adapters import add_adapters

    with torch.device("meta"):
        module = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    with warnings.catch_warnings(action="error"):
        add_adapters(module, {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": []})
    trained = [name for name, weight in module.named_parameters() if weight.requires_grad]
    assert len(trained) == 2


def test_frozen_weights_may_have_few_bits_and_adapters_keep_theirs() -> None:
    pytest.importorskip("peft")
    whole = _planned("finetune=lora").captured.graph
    few = _planned("finetune=lora", "weights=nf4").captured.graph
    layout = WeightFormat("nf4", 4, 64, group_bytes=4.0)
    changed = {
        name: (int(before), int(after))
        for name, before, after in zip(
            whole.weight_names, whole.weight_bytes, few.weight_bytes, strict=True
        )
        if before != after
    }
    assert len(changed) == 2 * 7
    assert not [name for name in changed if "lora" in name]
    gate = next(name for name in changed if "layers.0.mlp.gate_proj" in name)
    assert changed[gate][0] == 2 * 64 * 128
    assert changed[gate][1] == pytest.approx(layout.bytes_of(128, 64), rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("finetune=lora", "phase=inference"), "add phase=training"),
        (("finetune=lora", "finetune.rank=0"), "finetune.rank=0 must be 1 or more"),
        (("finetune=lora", "finetune.alpha=nan"), "finetune.alpha=nan must be a finite number"),
        (("finetune.rank=4",), "finetune.rank=4 applies to adapters, .*; add finetune=lora"),
        (("finetune=lora", "tensor_parallel=2"), "leave out tensor_parallel=2"),
        (("finetune=lora", "context_parallel=2"), "leave out finetune=lora, or context_parallel"),
        (("weights=nf4",), "leave out phase=training"),
        (("finetune=lora", "engine=megatron"), "got finetune=lora; use finetune=none"),
    ],
)
def test_adapters_that_cannot_be_planned_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FxpartError, match=message):
        check_all(read(*_overrides(*overrides)))


def test_a_missing_peft_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FxpartError, match=r"pip install 'fxpart\[peft\]'"):
        _planned("finetune=lora", "finetune.rank=3")


def test_a_rank_above_the_width_of_all_layers_makes_no_weights() -> None:
    with pytest.raises(FxpartError, match=r"no layer of \w+ is wider than 128; set a lower"):
        _planned("finetune=lora", f"finetune.rank={2**63 - 1}")
