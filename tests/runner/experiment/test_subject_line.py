"""The first line of a run and of its figures."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.cost.profile import OperatorProfile
from fxpart.cost.roofline import LatencyModel
from runner.experiment.operator_times import source_note
from runner.experiment.subject_line import count_parameters, subject_line
from tests.runner.composed import read
from tests.sketch import chain


def test_the_line_describes_the_whole_subject() -> None:
    graph = replace(
        chain(4),
        dtypes=("bfloat16",) * 3 + ("float32",),
        weight_bytes=np.array([2_000_000, 4_000_000, 2_000_000, 4_000], dtype=np.int64),
    )
    assert count_parameters(graph) == (4_001_000, "bfloat16")
    plain = read("model=gpt2", "devices=4x16gb", "mode=kl_based")
    assert subject_line(plain, graph) == (
        "gpt2, 4.00M parameters, bfloat16, batch 8 x 1024, inference, kl_based, 4x16gb, pcie4"
    )
    step = read(
        "model=resnet50",
        "devices=2x24gb",
        "transfer_rate=25gbit",
        "mode=pipeline",
        "phase=training",
        "checkpointing=block",
        "schedule=1f1b",
        "microbatches=8",
    )
    words = subject_line(step, graph).split(", ")
    assert words[3].startswith("batch ")
    assert " x " not in words[3]
    assert words[4:] == [
        "training with adamw",
        "checkpointing=block",
        "pipeline (1f1b",
        "8 microbatches)",
        "2x24gb",
        "25gbit",
    ]


def test_a_default_length_and_another_runtime_are_named() -> None:
    graph = chain(4)
    tokens = graph.value_bytes.copy()
    tokens[0] = 2 * 512 * 8
    of_text = replace(graph, value_names=("input_ids", *graph.value_names[1:]), value_bytes=tokens)
    model = ("model=transformers", "model.architecture=any", "devices=4x16gb")
    compiled = read(*model, "model.batch_size=2", "runtime=compiled")
    words = subject_line(compiled, of_text).split(", ")
    assert words[3] == "batch 2 x 512"
    assert "runtime=compiled" in words
    assert subject_line(compiled, graph).split(", ")[3] == "batch 2"
    # Two choices of an answer to each question.
    choices = replace(of_text, value_bytes=2 * tokens)
    assert subject_line(compiled, choices).split(", ")[3] == "batch 2"
    # A replica's graph has its share of the batch.
    replicas = read(*model, "model.batch_size=8", "data_parallel=4", "phase=training")
    assert subject_line(replicas, of_text).split(", ")[3] == "batch 8 x 512"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["execute=local"], "of a roofline of rtx_a4000, not of this machine"),
        (["execute=local", "latency=profiled"], ""),
        (["execute=none"], ""),
    ],
)
def test_times_of_another_machine_are_marked(overrides: list[str], expected: str) -> None:
    config = read("devices=2x16gb", *overrides)
    measured = OperatorProfile(np.ones(2), np.ones(2, dtype=np.int64), "x")
    times = LatencyModel() if config.latency.source == "roofline" else measured
    note = source_note(config, times, chain(2))
    assert note.startswith(expected)
    assert bool(note) is bool(expected)
    assert ("latency=profiled" in note) is bool(expected)


@pytest.mark.parametrize(("lost_share", "note"), [(0.4, "for 40% of the measurement"), (0.05, "")])
def test_a_disturbed_measurement_is_noted(lost_share: float, note: str) -> None:
    graph = chain(2)
    profile = OperatorProfile(np.ones(2), np.ones(2, dtype=np.int64), "cpu", 2, lost_share)
    text = source_note(read("latency=profiled"), profile, graph)
    assert note in text
    assert bool(text) is bool(note)


def test_a_decode_behind_an_encoder_has_the_decoder_s_parameters() -> None:
    graph = chain(2)
    names = ("encoder_states", *graph.value_names[1:])
    decode = replace(graph, value_names=names)
    config = read("model=t5_large", "phase=generate", "prompt_len=128", "output_len=64")
    words = subject_line(config, decode).split(", ")
    assert words[1].endswith(" parameters of the decoder")
    assert "64 tokens after prompts of 128" in words
    sound = subject_line(config, decode, reads_text=False)
    assert "64 tokens after the encoder's input" in sound
    assert "of the decoder" not in subject_line(config, graph)
