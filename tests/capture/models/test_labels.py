"""A transformers model is trained on its own loss, with labels as given by `Trainer`."""

import warnings
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.models.symbolic_inputs import symbolic_inputs
from fxpart.capture.symbolic.api import symbolic_graph
from fxpart.capture.symbolic.program import symbolic_program
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError, SpecError
from runner.experiment.subject_line import is_mean_of_outputs

_TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_BERT = {**_TINY, "intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 16}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 60}
_FUNNEL = {
    "d_model": 16,
    "d_head": 8,
    "d_inner": 32,
    "n_head": 2,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "vocab_size": 50,
}
_SPEECH = {
    "conv_dim": [8],
    "conv_stride": [160],
    "conv_kernel": [160],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}
_SERIES = {
    "num_input_channels": 3,
    "context_length": 32,
    "prediction_length": 6,
    "patch_length": 8,
    "patch_stride": 8,
    "num_targets": 5,
    "d_model": 16,
}
_PATCH_TST = {**_SERIES, **_TINY, "ffn_dim": 16}
_MIXER = {**_SERIES, "num_layers": 1}
_CLIP_PART = {**_TINY, "intermediate_size": 32}
_CLIP = {
    "text_config": {**_CLIP_PART, "vocab_size": 50, "max_position_embeddings": 16},
    "vision_config": {**_CLIP_PART, "image_size": 32, "patch_size": 16},
    "projection_dim": 8,
}


def _spec(name: str, config: Mapping[str, object], **fields: object) -> ModelSpec:
    usual: dict[str, object] = {"loss": "own", "batch_size": 3, "seq_len": 8}
    return ModelSpec(name, name, config, **{**usual, **fields})  # type: ignore[arg-type]


_BY_TASK = [
    (_spec("BertLMHeadModel", _BERT), {"labels": (3, 8)}),
    (_spec("BertForMaskedLM", _BERT), {"labels": (3, 8)}),
    (_spec("BertForPreTraining", _BERT), {"labels": (3, 8), "next_sentence_label": (3,)}),
    (_spec("BertForNextSentencePrediction", _BERT), {"labels": (3,)}),
    (_spec("ElectraForPreTraining", _BERT), {"labels": (3, 8)}),
    (_spec("FunnelForPreTraining", _FUNNEL), {"labels": (3, 8)}),
    (_spec("BertForSequenceClassification", {**_BERT, "num_labels": 5}), {"labels": (3,)}),
    (_spec("BertForSequenceClassification", {**_BERT, "num_labels": 1}), {"labels": (3,)}),
    (_spec("BertForTokenClassification", _BERT), {"labels": (3, 8)}),
    (_spec("BertForMultipleChoice", _BERT), {"labels": (3,)}),
    (_spec("BertForQuestionAnswering", _BERT), {"start_positions": (3,), "end_positions": (3,)}),
    (_spec("T5ForConditionalGeneration", _T5), {"labels": (3, 8)}),
    (
        _spec(
            "SegformerForSemanticSegmentation",
            {
                "num_encoder_blocks": 2,
                "depths": [1, 1],
                "hidden_sizes": [8, 16],
                "num_attention_heads": [1, 2],
                "sr_ratios": [2, 1],
                "decoder_hidden_size": 16,
                "num_labels": 7,
            },
            seq_len=None,
            batch_size=1,
        ),
        {"labels": (1, 224, 224)},
    ),
    (
        _spec(
            "ViTForImageClassification",
            {**_TINY, "intermediate_size": 32, "image_size": 32, "num_labels": 9},
            seq_len=None,
        ),
        {"labels": (3,)},
    ),
    (
        _spec(
            "Wav2Vec2ForSequenceClassification",
            {**_TINY, **_SPEECH, "intermediate_size": 32, "num_labels": 4},
            seq_len=1600,
        ),
        {"labels": (3,)},
    ),
    *(
        (_spec(name, config, seq_len=None), labels)
        for name, config, labels in (
            ("PatchTSTForPrediction", _PATCH_TST, {"future_values": (3, 6, 3)}),
            ("PatchTSTForRegression", _PATCH_TST, {"target_values": (3, 5)}),
            ("PatchTSTForClassification", _PATCH_TST, {"target_values": (3,)}),
            ("PatchTSMixerForPrediction", _MIXER, {"future_values": (3, 6, 3)}),
            ("PatchTSMixerForRegression", _MIXER, {"target_values": (3, 5)}),
            ("PatchTSMixerForTimeSeriesClassification", _MIXER, {"target_values": (3,)}),
        )
    ),
    (_spec("CLIPModel", _CLIP), {}),
]


@pytest.mark.parametrize(("spec", "expected"), _BY_TASK, ids=lambda of: getattr(of, "name", ""))
def test_labels_fit_the_loss_of_the_task(
    spec: ModelSpec, expected: dict[str, tuple[int, ...]]
) -> None:
    planned, real = build_model(spec), build_model(spec, torch.device("cpu"))
    shapes = {name: tuple(x.shape) for name, x in planned.kwargs.items() if name in expected}
    assert shapes == expected
    assert {n: x.dtype for n, x in real.kwargs.items()} == {
        n: x.dtype for n, x in planned.kwargs.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a regression of one number against another
        loss = real.module(**real.kwargs)["loss"]
    assert loss.dim() == 0
    assert torch.isfinite(loss)
    loss.backward()


@pytest.mark.parametrize(
    ("name", "config"), [("ElectraForPreTraining", _BERT), ("FunnelForPreTraining", _FUNNEL)]
)
def test_a_token_is_replaced_or_not(name: str, config: Mapping[str, object]) -> None:
    labels = build_model(_spec(name, config), torch.device("cpu")).kwargs["labels"]
    assert set(labels.flatten().tolist()) == {0, 1}


def _step(spec: ModelSpec) -> OpGraph:
    built = build_model(spec)
    return joint_capture(built.module, built.args, built.kwargs).graph


def _peak(graph: OpGraph) -> int:
    on_one = torch.zeros(graph.n_ops, dtype=torch.int64).numpy()
    return int(peak_bytes(memory_tables(graph), on_one, 1)[0])


def test_a_step_with_labels_needs_more_memory_than_the_mean_of_logits() -> None:
    spec = _spec("BertLMHeadModel", {**_BERT, "vocab_size": 5000})
    own, mean = _step(spec), _step(_spec("BertLMHeadModel", {**spec.config}, loss="mean"))
    assert any(name.startswith("nll_loss") for name in own.names)
    assert not is_mean_of_outputs(own)
    assert is_mean_of_outputs(mean)
    logits_bytes = 3 * 8 * 5000 * 4
    assert _peak(own) >= _peak(mean) + logits_bytes // 2


def test_a_model_without_a_loss_gets_no_labels() -> None:
    built = build_model(_spec("BertModel", _BERT))
    assert [*built.kwargs] == ["input_ids"]
    # Its loss is computed from the values of labels, which a capture does not have.
    config = {**_TINY, **_SPEECH, "intermediate_size": 32}
    assert [*build_model(_spec("Wav2Vec2ForCTC", config, seq_len=1600)).kwargs] == ["input_values"]


def test_a_likelihood_of_a_series_gets_no_values() -> None:
    spec = _spec("PatchTSTForPrediction", {**_PATCH_TST, "loss": "nll"}, seq_len=None)
    assert [*build_model(spec).kwargs] == ["past_values"]
    assert [*build_model(_spec("PatchTSTModel", _PATCH_TST, seq_len=None)).kwargs] == [
        "past_values"
    ]


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        (_spec("PatchTSTForPrediction", _PATCH_TST, seq_len=None), "mse_loss"),
        (_spec("CLIPModel", _CLIP), "div"),
    ],
    ids=lambda of: getattr(of, "name", ""),
)
def test_a_step_computes_the_loss_of_the_model(spec: ModelSpec, last: str) -> None:
    graph = _step(spec)
    assert not is_mean_of_outputs(graph)
    assert f"aten.{last}." in graph.targets[graph.first_backward - 1]
    assert is_mean_of_outputs(_step(replace(spec, loss="mean")))


def test_the_batch_of_a_contrastive_loss_may_be_symbolic() -> None:
    """Each text is compared with all images, so scores grow with the square of the batch."""
    spec = _spec("CLIPModel", _CLIP)
    inputs = symbolic_inputs(spec)
    built = inputs.built
    symbolic = symbolic_graph(
        built.module, built.args, built.kwargs, dims=inputs.dims, phase="training"
    )
    fresh = _step(replace(spec, batch_size=9))
    assert _peak(symbolic.at(batch=9)) == _peak(fresh)
    assert symbolic.at(batch=9).flops.sum() == fresh.flops.sum()
    assert [2] in symbolic.exponents.tolist()


def sum_of_squares(result: ModelOutput, inputs: dict[str, Tensor]) -> Tensor:
    """A user's loss, which also reads an input."""
    loss: Tensor = (result["logits"] ** 2).sum() + inputs["input_ids"].sum()
    return loss


def no_number(result: ModelOutput, inputs: dict[str, Tensor]) -> Tensor:
    """Not a loss."""
    logits: Tensor = result["logits"]
    return logits


def wrong(result: ModelOutput, inputs: dict[str, Tensor]) -> Tensor:
    """Reads a result that the model does not have."""
    loss: Tensor = result["no_such_result"].sum()
    return loss


def test_an_error_in_a_user_loss_names_the_loss() -> None:
    message = rf"^model\.loss={__name__}:wrong cannot be captured .*KeyError: 'no_such_result'"
    with pytest.raises(CaptureError, match=message):
        _step(_spec("BertLMHeadModel", _BERT, loss=f"{__name__}:wrong"))


def test_a_user_loss_gets_the_result_and_the_inputs() -> None:
    function = f"{__name__}:sum_of_squares"
    spec = _spec("BertLMHeadModel", _BERT, loss=function)
    graph = _step(spec)
    assert [name for name in graph.value_names if name == "labels"] == []
    assert any(target.startswith("aten.pow") for target in graph.targets)
    real = build_model(spec, torch.device("cpu"))
    plain = build_model(_spec("BertLMHeadModel", _BERT, loss=None), torch.device("cpu"))
    plain.module.load_state_dict(real.module.state_dict())
    loss = sum_of_squares(plain.module(**real.kwargs), real.kwargs)
    assert torch.equal(real.module(**real.kwargs), loss)
    assert spec.key() != _spec("BertLMHeadModel", _BERT).key()


def test_an_invalid_or_missing_loss_is_refused() -> None:
    with pytest.raises(
        (SpecError, CaptureError), match=r"shape \(3, 8, 50\); return a tensor of one"
    ):
        _step(_spec("BertLMHeadModel", _BERT, loss=f"{__name__}:no_number"))
    with pytest.raises(SpecError, match=r"model\.loss=crossentropy is not of the form"):
        _spec("BertLMHeadModel", _BERT, loss="crossentropy")


def test_advice_for_speech_models_names_their_random_settings() -> None:
    config = {**_TINY, **_SPEECH, "intermediate_size": 32}
    spec = _spec("Wav2Vec2ForCTC", config, seq_len=32000)
    built = build_model(spec)
    with pytest.raises(CaptureError, match=r"layerdrop=0 model\.config\.apply_spec_augment=false"):
        joint_capture(built.module.train(), (), built.kwargs)
    off = {**config, "layerdrop": 0, "apply_spec_augment": False}
    built = build_model(_spec("Wav2Vec2ForCTC", off, seq_len=32000))
    graph = joint_capture(built.module.train(), (), built.kwargs).graph
    # All but the embedding of masked spans.
    assert len(graph.gradient_values) == len(list(built.module.parameters())) - 1


_LED = {
    "d_model": 16,
    "vocab_size": 50,
    "encoder_layers": 1,
    "decoder_layers": 1,
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")},
}


@pytest.mark.parametrize("training", [False, True])
def test_a_step_of_a_model_that_branches_on_its_mask_is_captured(training: bool) -> None:
    built = build_model(_spec("LEDForConditionalGeneration", {**_LED, "attention_window": 4}))
    graph = joint_capture(built.module.train(training), (), built.kwargs).graph
    # No token attends globally, whose three projections have a weight and a bias each.
    assert len(graph.gradient_values) == len(list(built.module.parameters())) - 6


def test_advice_for_dropped_layers_names_the_parts_that_drop_them() -> None:
    config = {**_LED, "encoder_layerdrop": 0.1}
    built = build_model(_spec("BartForConditionalGeneration", config))
    with pytest.raises(CaptureError, match=r"; set model\.config\.encoder_layerdrop=0, or phase"):
        joint_capture(built.module.train(), (), built.kwargs)


def test_advice_for_a_model_that_mixes_dtypes_is_another_dtype() -> None:
    config = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 50}
    with pytest.raises(CaptureError, match=r"mixes dtypes; set model\.dtype=float32"):
        _step(_spec("XLNetModel", config, dtype="bfloat16"))


def test_the_batch_of_a_training_step_with_labels_may_be_symbolic() -> None:
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    inputs = symbolic_inputs(_spec("GPT2LMHeadModel", sizes))
    built = inputs.built
    program = symbolic_program(
        built.module, built.args, built.kwargs, dims=inputs.dims, phase="training"
    )
    assert [*program.ranges] == ["batch"]
