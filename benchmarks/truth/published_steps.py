"""Published times on one device that are in no table: a batch of one, and a small training step.

- ResNet-50, one image, on a V100: 12.8 ms in eager PyTorch, from the README of the measurements.
  The launch time of a V100's host (60 us per operator) is fitted to it.
- nanoGPT's README of December 2022 (MIT), GPT-2 with 124M parameters, 12 sequences of 1,024 tokens
  on an A100: about 250 ms in eager PyTorch, 135 ms compiled. Attention was unfused then, and
  weights were float32 under autocast (`model.autocast=bfloat16`).
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.planned_run import planned_run
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "published steps"
SOURCE = "README.md of the given measurements; karpathy/nanoGPT README.md@0110f3c (MIT)"

_RESNET = (
    *("model=resnet50", "model.batch_size=1", "model.dtype=float32"),
    "devices=1xv100_16gb",
)
_GPT2 = (
    *("model=gpt2", "model.dtype=float32", "model.autocast=bfloat16"),
    "model.config.attn_implementation=eager",
    *(f"model.config.{kind}_pdrop=0.0" for kind in ("resid", "embd", "attn")),
    *("model.batch_size=12", "model.seq_len=1024", "phase=training", "devices=1xa100_40gb"),
)
_STEPS = (
    ("ResNet-50, one image, V100, eager", 12.8, False, (*_RESNET, "runtime=eager")),
    ("GPT-2, training, A100, eager", 250.0, True, (*_GPT2, "runtime=eager")),
    ("GPT-2, training, A100, compiled", 135.0, True, (*_GPT2, "runtime=compiled")),
)
"""Label, measured ms, whether it is held out of fits, and the overrides of the run."""


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each step.

    Raises:
        FileNotFoundError: if `data` is not a folder of measurements.

    """
    if not (data / "README.md").is_file():
        raise FileNotFoundError(data / "README.md")
    for label, measured_ms, held_out, overrides in _STEPS:
        result = planned_run((*overrides, "mode=single"))
        predicted_ms = result.evaluation.latency_s * 1e3
        yield Row(label, predicted_ms, measured_ms, "ms", held_out=held_out)
