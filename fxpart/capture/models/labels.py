"""Labels of a transformers model, with which its ``forward`` returns a loss, as in `Trainer`.

The signature of ``forward`` determines which arguments are labels, by the rule of `Trainer`
(`transformers.utils.generic.find_labels`); their shapes and dtypes follow from the task in the name
of the class, from the configuration, and from the shapes of the other inputs. Values of time series
are labels too, under names which users pass to `Trainer` (``label_names``), and models that compare
images with texts compute their loss without labels (``return_loss``).
"""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import find_labels

__all__ = ["drawn_labels", "label_inputs", "with_own_loss"]


@dataclass(frozen=True, slots=True)
class _Labels:
    """Shape and range of one argument with labels."""

    sizes: tuple[int, ...]
    classes: int
    """Number of classes of integer labels; 0 if they are real-valued."""


_ANSWER = ("start_positions", "end_positions")
_OF_SERIES = ("future_values", "target_values")
_ONE_OF_TWO = ("next_sentence_label", "sentence_order_label")
_OF_TOKENS = ("LMHead", "CausalLM", "MaskedLM", "ConditionalGeneration", "PreTraining", "Seq2Seq")
_OF_EXAMPLES = (
    "SequenceClassification",
    "ImageClassification",
    "VideoClassification",
    "AudioClassification",
    "SentencePrediction",
    "XVector",
)
_OF_REPLACED_TOKENS = ("ElectraForPreTraining", "FunnelForPreTraining")
"""Classes that predict for each token whether it was replaced."""
_BY_VALUES = ("CTC",)
"""Classes that branch on the values of their labels, which a capture lacks."""
_LOSS_UNUSABLE = ("PeAudioFrameLevelModel", "VideoPrismClipModel")
"""Classes whose loss does not fit their results, or is not the first of them."""


def label_inputs(
    model: Any,  # noqa: ANN401 - transformers' classes are untyped
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the labels of `model` on the meta device, by name; real-valued ones have `dtype`.

    Empty if they are not supported: labels that are not tensors, such as boxes of detectors, and
    those of classes that branch on the values of labels.

    Args:
        model: a transformers model.
        inputs: its other inputs.
        dtype: dtype of real-valued labels.

    """
    return {
        name: torch.empty(
            labels.sizes,
            dtype=torch.int64 if labels.classes else dtype,
            device=torch.device("meta"),
        )
        for name, labels in _labels_of(model, inputs).items()
    }


def with_own_loss(model: Any) -> None:  # noqa: ANN401
    """Let all later calls of `model` return the loss that they compute if asked to.

    So do collators of models that compare images, recordings or videos with texts, as in
    transformers' ``run_clip.py``: each text belongs to the image of its row.
    """
    asked = inspect.signature(model.forward).parameters.get("return_loss")
    if asked is None or asked.default is True or type(model).__name__ in _LOSS_UNUSABLE:
        return
    model.forward = partial(model.forward, return_loss=True)


def drawn_labels(
    model: Any,  # noqa: ANN401
    inputs: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return random values of the labels among `inputs`, drawn from torch's generators."""
    if not any("label" in name or name in (*_ANSWER, *_OF_SERIES) for name in inputs):
        return {}
    return {
        name: torch.randint(labels.classes, labels.sizes, device=device)
        if labels.classes
        else torch.randn(labels.sizes, dtype=inputs[name].dtype, device=device)
        for name, labels in _labels_of(model, inputs).items()
        if name in inputs
    }


def _labels_of(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, _Labels]:  # noqa: ANN401
    kind = type(model).__name__
    if any(word in kind for word in _BY_VALUES):
        return {}
    labels: dict[str, _Labels] = {}
    parameters = inspect.signature(type(model).forward).parameters
    of_series = (name for name in _OF_SERIES if name in parameters)
    for name in (*find_labels(type(model)), *of_series):  # type: ignore[no-untyped-call]
        shape = _labels(name, model, inputs)
        if shape is not None:
            labels[name] = shape
    return labels


def _labels(name: str, model: Any, inputs: Mapping[str, Tensor]) -> _Labels | None:  # noqa: ANN401
    """Return the labels of argument `name`, or None if it is not supported."""
    kind, main = type(model).__name__, next(iter(inputs.values()))
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    batch, shape = int(main.shape[0]), None if tokens is None else tuple(map(int, tokens.shape))
    if name in _ONE_OF_TWO:
        return _Labels((batch,), 2)
    if name in _ANSWER:
        return _Labels((batch,), shape[-1]) if shape else None
    if name in _OF_SERIES:
        return _series_labels(kind, name, model.config, batch)
    return _task_labels(kind, model.config, main, shape) if name == "labels" else None


def _series_labels(kind: str, name: str, config: Any, batch: int) -> _Labels | None:  # noqa: ANN401
    """Return the labels of PatchTST and PatchTSMixer; other models take such values as inputs."""
    channels = getattr(config, "num_input_channels", None)
    if type(channels) is not int:
        return None
    if name == "target_values" and kind.endswith("Classification"):
        return _Labels((batch,), config.num_targets)
    # A likelihood (`nll`) branches on whether the values are possible.
    is_square = getattr(config, "loss", None) == "mse"
    if not is_square or not kind.endswith(("ForPrediction", "ForRegression")):
        return None
    if name == "target_values":
        return _Labels((batch, config.num_targets), 0)
    return _Labels((batch, config.prediction_length, channels), 0)


def _task_labels(
    kind: str,
    config: Any,  # noqa: ANN401
    main: Tensor,
    tokens: tuple[int, ...] | None,
) -> _Labels | None:
    """Return the labels of a class named `kind` from its main input and its tokens' shape."""
    batch, count = int(main.shape[0]), int(getattr(config, "num_labels", 0) or 0)
    labels = None
    if "MultipleChoice" in kind:
        labels = _Labels((batch,), int(main.shape[1]))
    elif "TokenClassification" in kind:
        labels = _Labels(tokens, count) if tokens else None
    elif "SemanticSegmentation" in kind:
        labels = _Labels((batch, *(int(side) for side in main.shape[-2:])), count)
    elif any(word in kind for word in _OF_EXAMPLES):
        labels = _example_labels(config, batch, count)
    elif tokens and any(word in kind for word in _OF_TOKENS):
        labels = _Labels(tokens, 2 if kind in _OF_REPLACED_TOKENS else _vocabulary(config))
    return labels


def _example_labels(config: Any, batch: int, count: int) -> _Labels:  # noqa: ANN401
    """Return one label per example, by transformers' rule for `problem_type`."""
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return _Labels((batch, count), 0)
    if problem == "regression" or (problem is None and count == 1):
        return _Labels((batch,) if count == 1 else (batch, count), 0)
    return _Labels((batch,), count)


def _vocabulary(config: Any) -> int:  # noqa: ANN401
    with suppress(
        TypeError, ValueError
    ):  # a class with several vocabularies, or without that argument
        config = config.get_text_config(decoder=True)
    stated = getattr(config, "vocab_size", 0)
    return stated if isinstance(stated, int) and stated > 0 else 1
