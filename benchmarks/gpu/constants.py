"""Measure the device constants in fxpart's settings: context, workspaces, launches and rates."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PARTS", "used_bytes"]

_CHAIN = 2000
"""Operators issued in a row without waiting for the device."""


def used_bytes() -> int:
    """Return the bytes in use on the device, from its driver, without creating a CUDA context."""
    import pynvml  # nvidia-ml-py, useful only on a machine with a GPU

    return int(pynvml.nvmlDeviceGetMemoryInfo(_handle()).used)


def _handle() -> Any:  # noqa: ANN401 - untyped upstream
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def _beyond_tensors(before_bytes: int) -> int:
    torch.cuda.synchronize()
    return used_bytes() - before_bytes - torch.cuda.memory_reserved()


def _context(before_bytes: int) -> dict[str, Any]:
    """Measure the device memory outside the allocator's segments as libraries are loaded."""
    result: dict[str, Any] = {}

    def note(name: str) -> None:
        result[f"beyond_tensors_bytes_{name}"] = _beyond_tensors(before_bytes)
        result[f"allocated_bytes_{name}"] = torch.cuda.memory_allocated()

    for dtype in (torch.bfloat16, torch.float32):
        square = torch.ones(1024, 1024, device="cuda", dtype=dtype)
        note(f"{dtype}_tensor")
        product = square @ square
        del product
        note(f"{dtype}_product")
        functional.layer_norm(square, (1024,))
        square.softmax(-1)
        note(f"{dtype}_pointwise")
    picture = torch.ones(8, 64, 56, 56, device="cuda", requires_grad=True)
    convolution = nn.Conv2d(64, 64, 3, device="cuda")
    _backward(convolution(picture))
    del picture, convolution
    note("convolution")
    heads = torch.ones(2, 16, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    _backward(functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True))
    note("attention")
    layer = nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16)
    _backward(layer(torch.ones(64, 1024, device="cuda", dtype=torch.bfloat16)))
    note("backward_thread")
    return result


def _backward(result: Tensor) -> None:
    torch.autograd.backward(result.sum())


def _launches(_: int) -> dict[str, Any]:
    """Measure the host's and the device's time for operators on tiny tensors, in microseconds."""
    x = torch.ones(16, 64, device="cuda")
    half = x.bfloat16()
    weight, bias = torch.ones(64, 64, device="cuda"), torch.ones(64, device="cuda")
    linear = nn.Linear(64, 64, device="cuda")
    norm = nn.LayerNorm(64, device="cuda")
    calls: dict[str, Callable[[], Tensor]] = {
        "add_in_place": lambda: x.add_(1),
        "add": lambda: x + 1,
        "linear": lambda: functional.linear(x, weight, bias),
        "linear_module": lambda: linear(x),
        "layer_norm_module": lambda: norm(x),
        "softmax": lambda: x.softmax(-1),
        "cast": half.float,
        "view": lambda: x.view(64, 16),
        "transpose": lambda: x.transpose(0, 1),
    }
    result: dict[str, Any] = {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for name, call in calls.items():
                issue_us, total_us = _chain_us(call)
                key = f"{name}_grad" if grad else name
                result[key] = {"issue_us": issue_us, "total_us": total_us}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CHAIN):
            x.add_(1)
    result["add_in_place_graph"] = {"total_us": _seconds(graph.replay, 5) / _CHAIN * 1e6}
    return result


def _chain_us(call: Callable[[], Tensor]) -> tuple[float, float]:
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_CHAIN):
        call()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return (issued - begin) / _CHAIN * 1e6, (end - begin) / _CHAIN * 1e6


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on the device, in seconds."""
    call()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        times.append(float(first.elapsed_time(last)) / 1e3)
    return sorted(times)[len(times) // 2]


def _bandwidth(_: int) -> dict[str, Any]:
    """Measure bytes per second, counting both reads and writes."""
    size = 2**31
    source = torch.empty(size // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    host = torch.empty(size // 8, dtype=torch.float32)
    pinned = host.pin_memory()
    part = target[: len(host)]
    half = source[: size // 8].bfloat16()
    return {
        "copy": 2 * size / _seconds(lambda: target.copy_(source), 9),
        "add": 3 * size / _seconds(lambda: torch.add(source, target, out=target), 9),
        "gelu_bf16": 2 * half.nbytes / _seconds(lambda: functional.gelu(half), 9),
        "cast": 1.5 * size / _seconds(source.bfloat16, 9),
        "layer_norm": 2
        * size
        / _seconds(lambda: functional.layer_norm(source.view(-1, 4096), (4096,)), 9),
        "softmax": 2 * size / _seconds(lambda: source.view(-1, 4096).softmax(-1), 9),
        "to_device_pinned": len(host) * 4 / _seconds(lambda: part.copy_(pinned), 5),
        "to_device_pageable": len(host) * 4 / _seconds(lambda: part.copy_(host), 3),
        "to_host_pinned": len(host) * 4 / _seconds(lambda: pinned.copy_(part), 5),
    }


def _sustained(_: int) -> dict[str, Any]:
    """Measure FLOP/s of single matrix products, and of products issued for seconds on end."""
    import pynvml

    return {
        str(dtype): _sustained_rates(size, dtype, seconds)
        for dtype, size, seconds in (
            (torch.bfloat16, 8192, 9.0),
            (torch.float16, 8192, 1.0),
            (torch.float32, 4096, 1.0),
        )
    } | {"power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(_handle()) / 1e3}


def _sustained_rates(size: int, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    import pynvml

    handle = _handle()
    left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=result)

    torch.cuda.synchronize()
    time.sleep(0.5)  # the clock rises again after earlier loads
    alone_s, flops = _seconds(multiply, 3), 2 * size**3
    rates, watts, clocks = [], [], []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        first = time.perf_counter()
        calls = max(1, int(0.5 / alone_s))
        for _ in range(calls):
            multiply()
        time.sleep(0.25)  # power and clock are read halfway through the queued products
        watts.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        clocks.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        torch.cuda.synchronize()
        rates.append(calls * flops / (time.perf_counter() - first))
    return {
        "alone_flops_per_s": flops / alone_s,
        "sustained_flops_per_s": rates,
        "power_w": watts,
        "sm_clock_mhz": clocks,
    }


def _attention(_: int) -> dict[str, Any]:
    """Measure torch's attention, forward and backward, in milliseconds."""
    result: dict[str, Any] = {}
    shapes = [(1, 32, 2048, 128), (4, 32, 2048, 128), (1, 32, 8192, 128), (8, 12, 1024, 64)]
    shapes += [(16, 16, 512, 64), (64, 16, 197, 64)]
    for is_causal in (True, False):
        for shape in shapes:
            key = f"{'causal' if is_causal else 'full'} {'x'.join(map(str, shape))}"
            result[key] = _attention_ms(shape, is_causal=is_causal)
    return result


def _attention_ms(shape: tuple[int, ...], *, is_causal: bool) -> dict[str, float]:
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(query)

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def both() -> None:
        torch.autograd.backward(forward(), gradient)

    with torch.no_grad():
        forward_s = _seconds(forward, 15)
    return {"forward_ms": forward_s * 1e3, "both_ms": _seconds(both, 15) * 1e3}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "context": _context,
    "launches": _launches,
    "bandwidth": _bandwidth,
    "sustained": _sustained,
    "attention": _attention,
}
"""Measurements by name; each receives the bytes in use on the device before its process."""
