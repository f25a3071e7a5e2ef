"""Tokens that vLLM caches beside Llama-3.1-8B on an RTX 4090, as logged by LLMServingSim's run.

    python -m benchmarks.truth --data FOLDER --set vllm_cache

The cache gets `gpu_memory_utilization` of the card, less the weights with the rotary embedding's
table, and less the peak of a profile run: a pass over `max_num_batched_tokens`, and then the
sampler for `max_num_seqs` sequences (vllm/v1/worker/gpu_worker.py and gpu_model_runner.py). The
sampler sorts the logits of all of them (PyTorch's version of `apply_top_k_top_p`), which is the
peak: 1.18 GiB with the tensors that the pass leaves, compared with 1.19 in vLLM's own logs of this
model and number of sequences. CUDA graphs are not subtracted before v0.20
(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS), nor is the context, which exists before vLLM first reads
the free memory. The run's settings and the memory of the card are in its meta.json
(casys-kaist/LLMServingSim, bench/results). Nothing is fitted to the row.

Whether v0.19's sampler sorts was not checked: with the kernel of later versions, which masks in
place, the peak would be 0.45 GiB and the prediction 46,400 tokens.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.planned_run import planned_run
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "cached_tokens", "rows", "sampler_bytes"]

NAME = "vllm_cache"
SOURCE = "casys-kaist/LLMServingSim docs/docs/validation.md@5daddb2, vLLM 0.19.0 on an RTX 4090"

_CARD_BYTES = 25_250_627_584
_UTILIZATION = 0.9
_BATCHED_TOKENS, _TEXTS = 2048, 256
_BLOCK_TOKENS = 16
_MEASURED_TOKENS = 41_408
_WIDTH, _VOCABULARY, _HEAD, _POSITIONS = 4096, 128_256, 128, 131_072
"""Vocabulary of Llama-3.1-8B."""
_WORKSPACE_BYTES = 67_108_864
"""Workspace of cuBLAS, as in conf/reserve/cuda.yaml."""


def rows(data: Path) -> Iterator[Row]:
    """Yield the one row.

    Raises:
        FileNotFoundError: if `data` is not a folder of measurements.

    """
    if not (data / "README.md").is_file():
        raise FileNotFoundError(2, "no such file", str(data / "README.md"))
    result = planned_run(
        (
            "model=llama3_1_8b",
            "phase=prefill",
            f"model.seq_len={_BATCHED_TOKENS}",
            "runtime=compiled",
            "devices=1x80gb",
            "mode=single",
        )
    )
    (use,) = result.evaluation.devices
    tokens = cached_tokens(
        weight_bytes=use.weight_bytes,
        pass_bytes=use.peak_bytes - use.weight_bytes - use.cache_bytes,
        token_bytes=use.cache_bytes // _BATCHED_TOKENS,
    )
    yield Row("Llama-3.1-8B bf16", tokens, _MEASURED_TOKENS, "tokens", held_out=True)


def cached_tokens(*, weight_bytes: int, pass_bytes: int, token_bytes: int) -> int:
    """Return how many tokens fit, in whole blocks; `pass_bytes` is the peak of a pass."""
    hidden = 2 * _BATCHED_TOKENS * _WIDTH
    peak = max(pass_bytes, hidden + sampler_bytes(_TEXTS, _VOCABULARY))
    table = 2 * _POSITIONS * _HEAD
    room = _UTILIZATION * _CARD_BYTES - weight_bytes - table - peak - _WORKSPACE_BYTES
    return int(room / token_bytes) // _BLOCK_TOKENS * _BLOCK_TOKENS


def sampler_bytes(texts: int, vocabulary: int) -> int:
    """Return the bytes that sorting the logits of `texts` sequences takes.

    These are the logits in 16 bits, their copy in float32, the sorted copy with 64-bit positions,
    and in CUB's segmented sort the positions to sort and a second buffer of both
    (ATen/native/cuda/Sort.cu).
    """
    return texts * vocabulary * (2 + 4 + (4 + 8) + 8 + (4 + 8))
