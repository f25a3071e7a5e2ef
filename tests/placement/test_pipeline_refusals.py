"""`pipeline`: refusals, and the message for a model that does not fit."""

import pytest

from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from tests.placement.encoder_decoder import encoder_decoder
from tests.sketch import Sketch, chain, devices, problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut_after": ["enc.blok.1"]}, "'enc.blok.1', which the model does not have; nearest"),
        ({"cut_after": [""]}, "'', which the model does not have"),
        ({"cut_after": ["dec"]}, "dec, after which the model ends"),
        ({"cut_after": ["enc", "emb"]}, "the cut after emb is before the one after enc"),
        ({"cut_after": ["enc.norm", "enc"]}, "at the same place as the one after enc.norm"),
        ({"cut_after": [1.1]}, r"must be a list of module paths, got \[1.1\]"),
        ({"cut_after": 1.1}, "must be a list of module paths, got 1.1"),
        ({"cut_after": ["emb", "enc"], "stages": 3}, "both mode.stages=3 and mode.cut_after"),
        (
            {"cut_after": ["emb", "enc", "dec.block"]},
            "4 stages, which take 4 devices, but there are 3",
        ),
        ({"stages": 4}, "4 stages, which take 4 devices, but there are 3"),
        ({"stages": 0}, "1 or more, got 0"),
        ({"stages": "two"}, "1 or more, got 'two'"),
        ({"stages": True}, "1 or more, got True"),
        ({"interleave": 0}, "at least 1, got 0"),
        ({"interleave": 2, "stages": 3}, "which does not divide 3 stages"),
        ({"interleave": 3, "stages": 9}, "can be cut into 6 at most"),
        (
            {"interleave": 2, "stages": 8},
            "8 stages, which take 4 devices of 2 stages each, but there are 3",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_mode("pipeline", options)(problem(encoder_decoder(), devices(99, 99, 99)))


def test_operators_that_forbid_cuts_are_named() -> None:
    sketch = Sketch()
    value = sketch.op([sketch.input(1)], 1)
    for _ in range(4):
        value = sketch.op([value], 1)
    graph = sketch.graph(sketch.op([value], 1, group=1))
    with pytest.raises(SpecError, match="into 2 at most in its order, since op1 and op5, 4 operat"):
        make_mode("pipeline", {"stages": 3})(problem(graph, devices(99, 99, 99)))


def test_a_stage_that_does_not_fit_is_named() -> None:
    this = problem(chain(6), devices(22, 40))
    with pytest.raises(InfeasibleError, match=r"stage 1 of mode.cut_after=layer1 needs 42 B") as e:
        make_mode("pipeline", {"cut_after": ["layer1"]})(this)
    assert (e.value.needed_bytes, e.value.available_bytes) == (42, 40)


def test_the_error_states_how_many_devices_would_be_enough() -> None:
    this = problem(chain(6), devices(22, 22))
    with pytest.raises(InfeasibleError, match="3 stages on devices of 22 B hold it") as caught:
        make_mode("pipeline")(this)
    assert caught.value.devices_that_fit == 3
    assert make_mode("pipeline")(problem(chain(6), devices(22, 22, 22))).n_partitions == 3
    with pytest.raises(InfeasibleError, match="operator op0 of layer0, with what must share"):
        make_mode("pipeline")(problem(chain(6), devices(9, 9)))


def test_an_interleaved_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="into 4 stages, 2 on each device, was found"):
        make_mode("pipeline", {"interleave": 2})(problem(chain(6), devices(22, 22)))
