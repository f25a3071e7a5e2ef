"""Which settings make another model, and what each of the models of a sweep is called."""

from collections.abc import Sequence

from runner.report.rows import SweepRow
from runner.report.scale import as_number
from runner.report.settings import cell

__all__ = ["changes_model", "model_keys", "model_label", "model_order"]

_WHOLE = ("model", "model.architecture", "model.factory", "model.config", "model.factory_args")
_PARTS = ("model.config.", "model.factory_args.")


def changes_model(key: str) -> bool:
    """Return whether jobs of two values of `key` run two models, whose times say nothing together.

    Batch size, length and type leave a model what it is.
    """
    return key in _WHOLE or key.startswith(_PARTS)


def model_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return those of `keys`, which jobs differ in, that change the model."""
    return tuple(key for key in keys if changes_model(key))


def model_label(row: SweepRow, keys: Sequence[str]) -> str:
    """Return what the model of `row` is called where models differ in `keys`.

    That is its name, as ``gpt2``, or what tells it from the others: ``gpt2 n_layer=12``.
    """
    last = [key.rpartition(".")[2] for key in keys]
    parts = [
        cell(row, key) if key == "model" else f"{key if last.count(name) > 1 else name}={text}"
        for key, name in zip(keys, last, strict=True)
        # Another model's own setting.
        if (text := row.settings.get(key)) is not None
    ]
    return " ".join(parts) or cell(row, "model")


def model_order(row: SweepRow, keys: Sequence[str]) -> tuple[tuple[bool, float, str], ...]:
    """Return what models are sorted by: names by their letters, numbers by their size."""
    found = [(True, 0.0, cell(row, "model"))]
    for key in keys:
        text = cell(row, key)
        number = None if key == "model" else as_number(text)
        found.append((number is None, number or 0.0, text))
    return tuple(found)
