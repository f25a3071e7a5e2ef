"""The configuration read back from a run's tags is the one that ran."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from runner.config.paths import conf_dir
from runner.config.schema import Config, ModeConfig, TrackingConfig
from runner.config.tags import (
    PIECE_LENGTH,
    config_document,
    config_from_document,
    config_from_tags,
    config_tags,
)
from tests.runner.composed import GROUPS, read

PRESETS = [
    [
        f"{group}={path.stem}"
        for path in sorted((conf_dir() / group).glob("*.yaml"))
        if path.stem != "workload"  # needs a file: tests/runner/experiment/test_objective.py
    ]
    for group in GROUPS
]
# One of each group at a time, until all were used: composing takes a tenth of a second.
TOGETHER = [
    [presets[row % len(presets)] for presets in PRESETS if presets]
    for row in range(max(map(len, PRESETS)))
]
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.just("(pairs)"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


TEMPLATES = {
    "model=custom": "model.factory=a.b:c",
    "model=timm": "model.architecture=resnet18",
    "model=diffusers": "model.architecture=FluxTransformer2DModel",
    "model=transformers": "model.architecture=A",
    "mode=custom": "mode.function=a.b:c",
}
"""Choices that require something, and what they require."""


@pytest.fixture(scope="module")
def base() -> Config:
    return read("model=gpt2")


@pytest.mark.parametrize("presets", TOGETHER)
def test_every_preset_is_read_back_unchanged(presets: list[str]) -> None:
    config = read(*presets, *(TEMPLATES[preset] for preset in presets if preset in TEMPLATES))
    # With the values of a document that was a file in between.
    document = json.loads(json.dumps(config_document(config)))
    assert config_from_document(document) == config
    assert config_from_tags(config_tags(config)) == replace(config, tracking=TrackingConfig())


@given(options=st.dictionaries(KEYS, VALUES, max_size=3))
def test_options_of_any_shape_are_read_back(base: Config, options: dict[Any, Any]) -> None:
    """Also keys that are numbers, which JSON turns into text."""
    config = replace(base, mode=ModeConfig("x", {"option": options}))
    restored = config_from_tags(config_tags(config)).mode.options["option"]
    assert restored == options
    assert repr(restored) == repr(options)  # 1 == True == 1.0, and they are not the same


def test_a_long_configuration_is_several_ordered_tags(base: Config) -> None:
    text = "".join(chr(97 + i % 26) for i in range(12 * PIECE_LENGTH))
    config = replace(base, question=text, where="ü" * 3)
    tags = config_tags(config)
    assert len(tags) > 11
    assert all(len(value) <= PIECE_LENGTH for value in tags.values())
    shuffled = dict(sorted(tags.items(), reverse=True)) | {"kind": "run", "config.other": "x"}
    assert config_from_tags(shuffled) == replace(config, tracking=TrackingConfig())


def test_the_place_of_the_store_is_left_out(base: Config) -> None:
    config = replace(base, tracking=TrackingConfig(uri="http://me:secret@host"))
    assert "secret" not in str(config_tags(config))


def test_numbers_keep_their_kind(base: Config) -> None:
    config = replace(base)
    config.transfer_rate = replace(config.transfer_rate, bytes_per_s=16e9, latency_s=math.inf)
    restored = config_from_tags(config_tags(config)).transfer_rate
    assert (repr(restored.bytes_per_s), restored.latency_s) == ("16000000000.0", math.inf)
    whole = config_from_document({"transfer_rate": {"bytes_per_s": 16}}).transfer_rate.bytes_per_s
    assert repr(whole) == "16.0"


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"modle": {}}, "modle does not exist here; nearest: mode, model"),
        ({"model": {"batchsize": 1}}, "model.batchsize does not exist here; nearest: batch_size"),
        ({"mode": {"options": {}}}, "mode.name is missing"),
        ({"model": 3}, "model is 3, not a section"),
        ({"mode": {"name": "x", "options": {"(pairs)": 1}}}, "one of its (pairs) is none"),
        ({"data_parallel": True}, "data_parallel is True, which is not of the type int"),
        ({"resume": 1}, "resume is 1, which is not of the type bool"),
        ({"granularity": None}, "granularity is None, which is not of the type str"),
        ({"devices": {"nodes": [0, "x"]}}, "devices.nodes.1 is 'x', which is not of the type int"),
        ({"devices": {"pools": {}}}, "devices.pools is {}, which is not of the type list"),
    ],
)
def test_a_document_of_another_form_is_refused_in_one_line(
    document: dict[str, object], says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        config_from_document(document)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "run it again from its overrides" in str(caught.value)


def test_missing_or_incomplete_tags_are_refused_in_one_line(base: Config) -> None:
    tags = config_tags(replace(base, question="x" * 2 * PIECE_LENGTH))
    for lost in tags:
        with pytest.raises(SpecError, match=r"cannot be used|has no tag config\.0") as caught:
            config_from_tags({name: tags[name] for name in tags if name != lost})
        assert "\n" not in str(caught.value)
    with pytest.raises(SpecError, match=r"has no tag config\.0, so its configuration is unknown"):
        config_from_tags({"kind": "sweep"})
    with pytest.raises(SpecError, match="they are a list, not sections"):
        config_from_tags({"config.0": "[1]"})
