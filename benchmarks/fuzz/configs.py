"""Configurations with odd values, planned in this process or by the whole command in a fork."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from subprocess import TimeoutExpired
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.composed import composed
from benchmarks.fork_server import fork_command
from benchmarks.fuzz.judge import CPU_LIMIT_S, WAIT_LIMIT_S, Tally
from benchmarks.fuzz.odd import changed_document, is_never_a_size, odd_number, odd_value
from benchmarks.time_limit import OverLimitError
from fxpart.errors import SpecError
from runner.cli.ending import USER_ERROR
from runner.config.tags import config_document, config_from_document
from runner.experiment.check import check
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from runner.output.terminal import without_progress
from runner.plans.request import Space

__all__ = ["fuzz_commands", "fuzz_configs"]

_PLAIN = ["tracking=none", "reserve=none", "figures=none"]
_MODEL = [
    "model=custom",
    "model.factory=benchmarks.fuzz.tiny:build",
    "model.name=tiny",
    *_PLAIN,
]
_BASES: tuple[list[str], ...] = (
    [],
    ["mode=size_based", "devices=2x16gb+1x80gb"],
    ["mode=pipeline", "schedule=gpipe", "microbatches=4", "devices=2x16gb"],
    ["phase=training", "optimizer=adam", "schedule=1f1b", "mode=pipeline", "microbatches=2"],
    ["capture.symbolic=batch", "model.batch_size=4", "batch_sweep=8"],
    ["data_parallel=2", "model.batch_size=4", "devices=2x16gb"],
    ["mode=cost_aware", "devices=2x0.001mb"],
    ["granularity=module", "devices=4xh100", "reserve=cuda"],
    ["phase=training", "data_parallel=2", "model.batch_size=4", "zero=1", "devices=2x16gb"],
    ["devices=2xh100", "price_per_hour={h100: 2.5}"],
    ["devices=1x0.001mb+host1gb", "mode=single"],
    ["mode=pipeline", "devices=2x16gb", "checkpointing=block", "phase=training"],
    ["runtime=compiled", "objective=memory", "mode=cost_aware", "devices=2xh100"],
    ["phase=training", "data_parallel=2", "model.batch_size=4", "zero=3", "devices=2x16gb"],
)
"""Configurations to change."""
_GPT2 = [
    *("model=gpt2", "model.batch_size=2", "model.seq_len=8", "model.config.n_positions=32"),
    *("model.config.n_layer=2", "model.config.n_embd=16", "model.config.n_head=2"),
    "model.config.vocab_size=64",
]
_MIXTRAL = [
    *("model=mixtral_8x7b", "model.batch_size=2", "model.seq_len=8", "model.dtype=float32"),
    *("model.config.num_hidden_layers=1", "model.config.hidden_size=16"),
    *("model.config.intermediate_size=16", "model.config.num_local_experts=4"),
    *("model.config.num_attention_heads=4", "model.config.num_key_value_heads=2"),
    *("model.config.vocab_size=64", "model.config.max_position_embeddings=64"),
]
_GENERATE = ["phase=generate", "prompt_len=6", "output_len=4", "mode=single", "devices=1x16gb"]
_DECODERS: tuple[list[str], ...] = (
    [*_GPT2, "devices=2x16gb", "mode=pipeline"],
    [*_GPT2, *_GENERATE, "serving_sweep.batches=[1,4]", "serving_sweep.contexts=[8,16]"],
    [
        *_GPT2,
        "phase=decode",
        "context_len=16",
        "weights=int4",
        "weights.group_size=8",
        "kv_cache=fp8",
        "mode=single",
    ],
    [*_GPT2, "phase=training", "finetune=lora", "finetune.targets=[c_attn]", "devices=1x16gb"],
    [*_GPT2, "devices=1x0.1mb+host1gb", "mode=single", "offload=accelerate"],
    [*_GPT2, "runtime=compiled", "latency=kernels", "devices=2xh100", "mode=kl_based"],
    [*_MIXTRAL, "tensor_parallel=2", "devices=2xh100", "mode=single"],
    [
        *(*_MIXTRAL, "expert_parallel=2", "data_parallel=2", "devices=2xh100", "mode=single"),
        *("phase=training", "expert_imbalance=1.5", "zero=1"),
    ],
    [
        *(*_MIXTRAL, "context_parallel=2", "devices=2xh100", "mode=single"),
        *("phase=training", "objective=throughput"),
    ],
    [*_MIXTRAL, *_GENERATE, "weights=nf4", "weights.group_size=8", "runtime=graph"],
)
"""Configurations of small models of transformers, which take a second or two to capture."""
_SIZES = (
    "model.batch_size",
    "devices.pools.0.count",
    "devices.pools.0.memory_bytes",
    "devices.pools.0.memory_bandwidth_bytes_per_s",
    "devices.pools.0.flops_per_s.float32",
    "transfer_rate.bytes_per_s",
    "transfer_rate.latency_s",
    "latency.compute_efficiency",
    "latency.bandwidth_efficiency",
    "latency.op_overhead_s",
    "reserve.context_bytes",
    "reserve.workspace_bytes",
    "reserve.rounding_bytes",
    "reserve.fragmentation",
    "data_parallel",
    "tensor_parallel",
    "expert_parallel",
    "context_parallel",
    "expert_imbalance",
    "context_len",
    "prompt_len",
    "output_len",
    "prefill_batch",
    "zero",
    "microbatches",
    "batch_sweep",
)
"""Settings that always matter: negative values and NaN must be refused."""


def _implausible_figures(result: Result) -> str | None:
    evaluation = result.evaluation
    figures = [evaluation.latency_s, evaluation.throughput_per_s, evaluation.critical_path_s]
    for device in evaluation.devices:
        figures += [device.peak_bytes, device.weight_bytes, device.load_s, device.free_bytes]
    if result.schedule:
        figures += [result.schedule.step_s, *result.schedule.peak_bytes]
    return None if all(0 <= figure < math.inf for figure in figures) else f"figures {figures}"


def _plan(document: dict[str, Any]) -> Result:
    config = config_from_document(document)
    check(config)
    with without_progress(), contextlib.redirect_stderr(io.StringIO()):
        return plan(config, model_spec(config))


def _set(document: dict[str, Any], key: str, value: object) -> None:
    *parents, last = key.split(".")
    holder: Any = document
    for name in parents:
        holder = holder[int(name)] if isinstance(holder, list) else holder[name]
    holder[last] = value


def fuzz_configs(
    run: Callable[[Any, int], None], cases: int, folder: Path, *, decoders: bool = False
) -> Tally:
    """Plan `cases` configurations, or those of `decoders`; `run` as in `fuzz_specs`."""
    tally = Tally("decoders" if decoders else "configurations")
    documents = []
    common, bases = (_PLAIN, _DECODERS) if decoders else (_MODEL, _BASES)
    for overrides in bases:
        document: Any = config_document(
            composed(*common, *overrides, f"capture.cache_dir={folder / 'cache'}")
        )
        del document["tracking"], document["capture"]["cache_dir"]
        documents.append(document)

    @given(st.randoms(use_true_random=False), st.sampled_from(documents), st.booleans())
    def configs(rnd: Random, document: dict[str, Any], one_size: bool) -> None:
        must_fail = False
        if one_size:
            document = json.loads(json.dumps(document))
            key, value = rnd.choice(_SIZES), odd_number(rnd)
            _set(document, key, value)
            change, must_fail = f"{key}={value!r:.60}", is_never_a_size(value)
        else:
            document, change = changed_document(rnd, document)
        if isinstance(document.get("capture"), dict):
            document["capture"]["cache_dir"] = str(folder / "cache")
        tally.attempt(change, lambda: _plan(document), _implausible_figures, must_fail=must_fail)

    run(configs, cases)
    return tally


# The whole command.

_KEYS = (
    *_SIZES,
    "model",
    "devices",
    "mode",
    "transfer_rate",
    "latency",
    "schedule",
    "phase",
    "optimizer",
    "model.dtype",
    "model.seq_len",
    "model.factory_args",
    "model.depends_on",
    "devices.nodes",
    "devices.between_nodes",
    "capture.cache_dir",
    "capture.level",
    "granularity",
    "checkpointing",
    "hydra.run.dir",
    "mode.assignment",
    "latency.file",
    "latency.tables",
    "price_per_hour",
    "sequence_parallel",
    "engine",
    "weights",
    "kv_cache",
    "serving_sweep.batches",
    "serving_sweep.contexts",
    "finetune",
    "finetune.rank",
    "finetune.targets",
    "offload",
    "devices.tiers",
    "runtime",
    "backward_order",
    "objective",
    "nonsense",
    "zip",
    "where",
    "rerun",
)
_TEXTS = (
    "",
    "null",
    "[]",
    "{a: 1}",
    "${now:%Y}",
    "[${now:%Y}]",
    "${model}",
    "${nonsense}",
    "${oc.env:HOME}",
    "'",
    "[[[",
    "x" * 5000,
    "/dev/zero",
    "/proc/self/mem",
    "~",
    "1e400",
    "0x10",
    "-1",
    ".nan",
    "9" * 30,
    "{h100: {a: 1}}",
    "{h100: .nan}",
    "1x16gb+host0gb",
    "2x16gb+nvme9300000tb",
    "lora",
    "generate",
    "nf4",
)
_SPACE = (*(field.name for field in fields(Space)), "nonsense")
_RECOMMEND_KEYS = (
    "objective",
    "global_batch",
    "rows",
    "devices",
    *(f"space.{name}" for name in _SPACE),
)
"""Settings of `runner.recommend`."""
_RECOMMEND_SHARE = 0.15
"""Share of the commands that run it."""


def _command(
    tally: Tally, folder: Path, overrides: list[str], *, must_fail: bool, module: str = "runner"
) -> None:
    case = " ".join((module, *overrides))

    def work() -> tuple[int, str, str]:
        try:
            code, out, err = fork_command(
                folder, ("-m", module), overrides, WAIT_LIMIT_S - 5, CPU_LIMIT_S
            )
        except TimeoutExpired as error:
            raise OverLimitError from error
        message = err.partition("error: ")[2].strip()
        is_one_line = message and "error: " not in message and "\n" not in message
        if code == USER_ERROR and is_one_line and "Traceback" not in out + err:
            raise SpecError(message)
        return code, out, err

    def unsound(result: tuple[int, str, str]) -> str | None:
        code, out, err = result
        if "Traceback" in out + err:
            return f"traceback: {err[-200:]!r}"
        return f"exit code {code}: {err[-200:]!r}" if code else None

    tally.attempt(case, work, unsound, must_fail=must_fail)


def fuzz_commands(run: Callable[[Any, int], None], cases: int, folder: Path) -> Tally:
    """Run `cases` commands in `folder`, each in its own process; `run` as in `fuzz_specs`."""
    tally = Tally("commands")
    fork_command(folder, ("-c", "pass"), [], 300)  # the first imports count for no case

    @given(st.randoms(use_true_random=False), st.sampled_from([*_BASES, *_DECODERS]))
    def commands(rnd: Random, base: list[str]) -> None:
        overrides = [*_MODEL, *base] if base in _BASES else [*_PLAIN, *base]
        if rnd.random() < _RECOMMEND_SHARE:
            text = rnd.choice((*_TEXTS, "[0]", "[1,-1]", "[null]", "[[1]]", str(odd_number(rnd))))
            arguments = [
                *_MODEL,
                f"recommend.{rnd.choice(_RECOMMEND_KEYS)}={text}",
                "devices=2x16gb",
            ]
            _command(tally, folder, arguments, must_fail=False, module="runner.recommend")
            return
        key = rnd.choice(_KEYS)
        is_number = key in _SIZES and rnd.random() < 0.7
        value = odd_number(rnd) if is_number else rnd.choice((*_TEXTS, odd_value(rnd)))
        text = str(value).replace("\0", "").encode(errors="replace").decode()
        must_fail = is_number and is_never_a_size(value)
        _command(tally, folder, [*overrides, f"{key}={text}"], must_fail=must_fail)

    run(commands, cases)
    return tally
