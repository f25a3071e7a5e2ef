"""What is offloaded, and how: known answers, and a bound that no plan beats."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fxpart.core.graph import CACHE, FloatArray, OpGraph
from fxpart.core.tiers import OffloadOptions, Tier, Tiers, tiers_of
from fxpart.core.topology import DeviceSpec, Topology
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.offload.bound import bound_s, least_load_s
from fxpart.placement.offload.copies import costed
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.other_sizes import TieredPlan, most_offloaded
from fxpart.placement.offload.plan import Offloaded, finished, offload
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED, cache_writes, units_of
from fxpart.placement.size_based import size_based
from tests.sketch import GIVEN, Sketch, devices, installed_modes, problem

AUTO = OffloadOptions()
PREFETCH = OffloadOptions("prefetch", on_host=False)
SERIAL = OffloadOptions("accelerate", overlap=False, on_host=False)


def blocks(count: int, weight: int = 10, flops: int = 4) -> OpGraph:
    sketch = Sketch()
    value = sketch.input(0)
    for i in range(count):
        value = sketch.op([value], 1, [sketch.weight(weight)], flops, module=f"layers.{i}.linear")
    return sketch.graph(value)


def host(memory_bytes: int = 1000, speed: float | None = None) -> Tier:
    processor = DeviceSpec("host", memory_bytes, {"float32": speed}, 1e9) if speed else None
    return Tier("host", "host", memory_bytes, processor=processor)


def times(graph: OpGraph, topology: Topology) -> FloatArray:
    return LatencyModel().op_time_s(graph, topology)


def offloaded(
    graph: OpGraph,
    topology: Topology,
    tiers: Tiers,
    options: OffloadOptions = AUTO,
    link_bytes_per_s: float = 1.0,
) -> Offloaded:
    machine = Machine(problem(graph, topology), tiers, options, (link_bytes_per_s, 0.0), times)
    return offload(machine, size_based)


def test_only_what_does_not_fit_is_streamed() -> None:
    # Of 6 blocks of 10 bytes on 45: 2 buffers for copies of 10 leave space for 2 blocks and values.
    plan = offloaded(blocks(6), devices(45), Tiers(host()), PREFETCH)
    assert (plan.ways == STREAMED).sum() == 4
    assert plan.evaluation.devices[0].peak_bytes <= 45
    assert plan.evaluation.devices[0].weight_bytes == 20
    assert plan.streamed_bytes == plan.stored_bytes() == 40
    # Without overlap one buffer is enough.
    serial = offloaded(blocks(6), devices(45), Tiers(host()), SERIAL)
    assert (serial.ways == STREAMED).sum() == 3
    assert serial.evaluation.latency_s == 6 * 4 + 3 * 10
    assert serial.waited_s == 30


def test_copies_are_spread_over_the_model_with_overlap() -> None:
    plan = offloaded(blocks(16), devices(145), Tiers(host()), PREFETCH)
    streamed = np.flatnonzero(plan.ways == STREAMED)
    assert len(streamed) == 4
    assert np.diff(streamed).min() > 1
    # 40 s of copies hide behind 64 s of computing, except the first.
    assert plan.waited_s <= 10


@pytest.mark.parametrize("options", [OffloadOptions("host", stream=False), AUTO, PREFETCH])
def test_blocks_that_fit_beside_an_offloaded_large_module_return(
    options: OffloadOptions,
) -> None:
    sketch = Sketch()
    is_prefetch = options is PREFETCH
    value = sketch.op([sketch.input(0)], 1, [sketch.weight(100)] * is_prefetch, 4, module="embed")
    for i in range(4):
        value = sketch.op([value], 1, [sketch.weight(10)], 4, module=f"layers.{i}.linear")
    value = sketch.op([value], 1, [sketch.weight(100)], 4000, module="lm_head")
    graph, speed = sketch.graph(value), None if is_prefetch else 0.5
    # The head goes last; without it there is memory for blocks, and, streamed, for two copies.
    plan = offloaded(graph, devices(205 if is_prefetch else 95), Tiers(host(speed=speed)), options)
    away = [unit.path for unit, choice in zip(plan.units, plan.ways, strict=True) if choice]
    assert away == (["embed", "layers.0", "lm_head"] if is_prefetch else ["lm_head"])


@pytest.mark.parametrize(("speed", "way"), [(100.0, HOSTED), (1e-3, STREAMED)])
def test_the_cheaper_of_streaming_and_the_host_is_chosen(speed: float, way: int) -> None:
    plan = offloaded(blocks(6), devices(45), Tiers(host(speed=speed)))
    assert set(plan.ways.tolist()) == {RESIDENT, way}
    on_host = plan.assignment.device_of == 1
    assert on_host.any() == (way == HOSTED)
    if way == HOSTED:  # whose weights then count there
        assert plan.evaluation.devices[1].weight_bytes == 10 * on_host.sum()
        assert plan.streamed_bytes == 0


def test_the_disk_gets_what_the_host_does_not_hold() -> None:
    disk = Tier("disk", "disk", 100, bytes_per_s=0.5)
    plan = offloaded(blocks(8), devices(45), Tiers(host(50), disk), PREFETCH)
    # 6 blocks are streamed; the host has memory for 3 besides the buffer for those passing through.
    assert plan.stored_bytes() == 30
    assert plan.stored_bytes(disk=True) == 30
    assert (plan.passing_bytes, plan.beside_bytes) == (20, 50)
    assert {copy.source.from_disk for copy in plan.copies} == {True, False}
    # 30 bytes arrive at half a byte per second.
    assert plan.evaluation.latency_s >= 60


def test_the_free_host_memory_excludes_streamed_weights() -> None:
    task = problem(blocks(6), devices(45))
    machine = Machine(task, Tiers(host(speed=1.0)), AUTO, (1.0, 0.0), times)
    choices = np.array([RESIDENT, STREAMED, HOSTED, STREAMED, HOSTED, STREAMED], dtype=np.int64)
    plan = finished(machine, choices, size_based)
    use = plan.evaluation.devices[1]
    assert (use.weight_bytes, plan.stored_bytes(), use.total_bytes) == (20, 30, 1000)
    assert use.free_bytes == 1000 - use.peak_bytes - 30


def test_full_tiers_are_an_error() -> None:
    with pytest.raises(InfeasibleError, match="tiers, which are full: host 30 B"):
        offloaded(blocks(8), devices(45), Tiers(host(30)), PREFETCH)
    disk = Tier("disk", "disk", 1000, bytes_per_s=1.0)
    with pytest.raises(
        InfeasibleError, match=r"from disk pass through 20 B of host, which has 5 B"
    ):
        offloaded(blocks(8), devices(45), Tiers(host(5), disk), PREFETCH)
    # The memory is that of the devices, not what the copies leave of it.
    with pytest.raises(
        InfeasibleError, match=r"room for copies of 200 B do not fit the devices, 1 x 45 B;"
    ) as refused:
        offloaded(blocks(8, weight=100), devices(45), Tiers(host()), PREFETCH)
    assert refused.value.available_bytes == 45
    assert refused.value.needed_bytes > 200


def test_a_disk_does_not_hold_what_the_host_computes() -> None:
    disk = Tier("nvme", "disk", 1000, bytes_per_s=1.0)
    on_host = OffloadOptions("host", stream=False)
    with pytest.raises(
        InfeasibleError, match=r"on the host need \d+ B of its memory, host has 30 B, and nvme"
    ) as refused:
        offloaded(blocks(8), devices(45), Tiers(host(30, speed=1.0), disk), on_host)
    assert "full" not in str(refused.value)
    assert "offload=prefetch" in str(refused.value)


def test_every_offloading_is_above_the_bound() -> None:
    """All assignments of 4 blocks, costed one by one, beside the bound and the plan."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        sketch = Sketch()
        value = sketch.input(0)
        for i in range(4):
            size, flops = (int(x) for x in rng.integers(1, 20, size=2))
            uses = [sketch.weight(size)]
            value = sketch.op([value], 1, uses, flops, module=f"layers.{i}.linear")
        graph = sketch.graph(value)
        tiers = Tiers(host(speed=float(rng.uniform(0.2, 1.0))))
        topology = devices(graph.total_weight_bytes * 2 // 3)
        machine = Machine(problem(graph, topology), tiers, AUTO, (2.0, 0.0), times)
        best_s = least_load = np.inf
        for choices in product((RESIDENT, STREAMED, HOSTED), repeat=4):
            chosen = np.array(choices, dtype=np.int64)
            try:
                offload_plan = finished(machine, chosen, size_based)
            except InfeasibleError:
                continue
            if offload_plan.evaluation.devices[0].peak_bytes <= topology.memory_bytes[0]:
                best_s = min(best_s, offload_plan.evaluation.latency_s)
                least_load = min(least_load, offload_plan.evaluation.load_s)
        bound = bound_s(machine)
        assert 0 < bound <= best_s
        assert 0 < least_load_s(machine) <= least_load * (1 + 1e-9)
        assert offload_plan.evaluation.load_bound_s == least_load_s(machine)
        try:
            plan = offloaded(graph, topology, tiers, link_bytes_per_s=2.0)
        except InfeasibleError:
            continue
        assert best_s <= plan.evaluation.latency_s <= 3 * best_s
        assert plan.evaluation.lower_bound_s == bound


def test_the_bound_counts_what_must_be_copied() -> None:
    plan = offloaded(blocks(20, flops=1), devices(45, 45), Tiers(host()), PREFETCH)
    # 110 bytes do not fit, and arrive over two links.
    assert plan.evaluation.lower_bound_s == 110 / 2
    shared = OffloadOptions("prefetch", on_host=False, host_bytes_per_s=1.0)
    plan = offloaded(blocks(20, flops=1), devices(45, 45), Tiers(host()), shared)
    assert plan.evaluation.lower_bound_s == 110


def test_the_bound_uses_the_used_weights_and_the_available_memory() -> None:
    sketch = Sketch()
    sketch.weight(500)  # used by no operator
    value = sketch.input(0)
    for i in range(6):
        value = sketch.op([value], 1, [sketch.weight(10)], 1, module=f"layers.{i}.linear")
    graph = sketch.graph(value)
    first, cut = problem(graph, devices(45)), problem(graph, devices(35))
    for task in (first, cut):
        machine = Machine(task, Tiers(host()), PREFETCH, (1.0, 0.0), times, first)
        assert bound_s(machine) == 60 - 45


def test_modules_that_must_stay_together_are_offloaded_together() -> None:
    sketch = Sketch()
    value = sketch.input(0)
    for i in range(12):  # three in a row stay together, blocks have two
        uses, module = [sketch.weight(10)], f"layers.{i // 2}.{i % 2}"
        value = sketch.op([value], 1, uses, 4, module=module, group=i // 3 * 3)
    graph = sketch.graph(value)
    task = problem(graph, devices(75))
    for speed, options in ((100.0, OffloadOptions("host", stream=False)), (0.2, AUTO)):
        plan = offloaded(graph, task.topology, Tiers(host(speed=speed)), options)
        hosted = [u for u, choice in zip(plan.units, plan.ways, strict=True) if choice == HOSTED]
        on_host = np.flatnonzero(plan.assignment.device_of == 1).tolist()
        assert on_host == sorted(op for unit in hosted for op in unit.ops.tolist())
        assert on_host
        weight_bytes = plan.evaluation.devices[1].weight_bytes
        assert weight_bytes == sum(unit.weight_bytes for unit in hosted) == 10 * len(on_host)


def test_pinned_memory_is_used_up_to_its_limit() -> None:
    options = OffloadOptions("prefetch", on_host=False, pageable_share=0.5, pinned_bytes=20)
    plan = offloaded(blocks(6), devices(45), Tiers(host()), options)
    assert sorted(copy.source.share for copy in plan.copies) == [0.5, 0.5, 1.0, 1.0]


def test_units_are_blocks_and_the_modules_beside_them() -> None:
    sketch = Sketch()
    ids, shared = sketch.input(1), sketch.weight(50)
    value = sketch.op([ids], 1, [shared], module="embed")
    for i in range(2):
        for part in ("attention", "mlp"):
            value = sketch.op([value], 1, [sketch.weight(30)], 1, module=f"layers.{i}.{part}")
    value = sketch.op([value], 1, [sketch.weight(7)], module="norm")
    graph = sketch.graph(sketch.op([value], 1, [shared], module="head"))
    # The embedding is tied to the head: it stays.
    assert [(u.path, u.weight_bytes) for u in units_of(graph, 100)] == [
        ("layers.0", 60),
        ("layers.1", 60),
        ("norm", 7),
    ]
    assert [unit.path for unit in units_of(graph, 40)] == [
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
        "layers.1.mlp",
        "norm",
    ]


def test_a_streamed_weight_stays_until_its_views_are_read() -> None:
    sketch = Sketch()
    value = sketch.input(0)
    for i in range(2):
        view = sketch.op([], 10, [sketch.weight(10)], module=f"layers.{i}")
        product = [value, view, sketch.op([view], 10, view_of=view, module=f"layers.{i}")]
        value = sketch.op(product, 1, flops=4, module=f"layers.{i}")
    graph = sketch.graph(value)
    graph.value_alloc_bytes[graph.value_bytes == 10] = 0  # they are where the weights are
    machine = Machine(problem(graph, devices(25)), Tiers(host()), PREFETCH, (1.0, 0.0), times)
    plan = finished(machine, np.full(2, STREAMED), size_based)
    assert [(copy.first_op, copy.last_op) for copy in plan.copies] == [(0, 2), (3, 5)]
    # Sent to another device, a view is no use of the weight there.
    cost = costed(machine, plan.ways, plan.on_disk, np.array([0, 0, 1, 0, 0, 1]))
    assert [(copy.device, copy.last_op) for copy in cost.copies] == [(0, 1), (0, 4)]
    # A weight that another module reads through a view stays.
    other = replace(graph, modules=(*graph.modules[:5], "head"))
    assert [unit.path for unit in units_of(other, 100)] == ["layers.0"]


def test_invalid_tiers_are_refused() -> None:
    disk = Tier("nvme1gb", "disk", 10**9, 1e9)
    assert tiers_of([]) is None
    assert tiers_of([disk, host()]) == Tiers(host(), disk)
    with pytest.raises(SpecError, match=r"nvme1gb has no link to a device.*add it"):
        tiers_of([disk])
    with pytest.raises(SpecError, match="nvme has no link: its bytes_per_s is None"):
        tiers_of([host(), Tier("nvme", "disk", 1)])
    with pytest.raises(SpecError, match=r"tier host has bytes_per_s=0\.0"):
        tiers_of([Tier("host", "host", 1, 0.0)])
    with pytest.raises(SpecError, match="both of kind host"):
        tiers_of([host(), host()])
    with pytest.raises(SpecError, match="of kind tape"):
        tiers_of([Tier("t", "tape", 1)])
    with pytest.raises(SpecError, match=r"offload\.pinned_share=0\.0"):
        OffloadOptions(pinned_share=0.0)
    with pytest.raises(SpecError, match="neither streams nor computes"):
        OffloadOptions("none", stream=False, on_host=False)


@pytest.mark.parametrize("mode", sorted(set(installed_modes()) - {*GIVEN, "sparse_nn"}))
def test_every_mode_places_what_is_left(mode: str) -> None:
    options = {"steps": 20} if mode == "optimal" else {}
    task = problem(blocks(12), devices(45, 45))
    machine = Machine(task, Tiers(host()), PREFETCH, (1.0, 0.0), times)
    plan = offload(machine, make_mode(mode, options))
    memory = task.topology.memory_bytes.tolist()
    for use, limit in zip(plan.evaluation.devices, memory, strict=True):
        assert use.peak_bytes <= limit
    # A device holds two blocks besides two buffers for copies.
    assert (plan.ways == STREAMED).sum() >= (10 if mode == "single" else 8)


def cached_blocks(count: int, weight: int = 10) -> OpGraph:
    """Blocks of weights that write 1 byte of their cache of 20, then take 4 s to attend to it."""
    sketch = Sketch()
    value = sketch.input(1)
    caches = [sketch.input(20) for _ in range(count)]
    for i, cache in enumerate(caches):
        module, op = f"layers.{i}.attention", len(sketch.ops)
        written = sketch.op([cache, value], 20, view_of=cache, module=module)
        uses = [sketch.weight(weight)]
        value = sketch.op([written, value], 1, uses, 4, module=module, group=op)
    graph = sketch.graph(value)
    is_cache = [value in caches for value in range(graph.n_values)]
    return replace(
        graph,
        moved_bytes=np.ones(graph.n_ops, dtype=np.int64),
        value_names=tuple(
            f"{CACHE * cached}{name}"
            for name, cached in zip(graph.value_names, is_cache, strict=True)
        ),
    )


def test_only_the_written_part_of_a_cache_is_copied_back() -> None:
    graph = cached_blocks(3)
    all_caches = OffloadOptions("prefetch", on_host=False, cache="all")
    plan = offloaded(graph, devices(100), Tiers(host()), all_caches)
    assert (plan.ways == RESIDENT).all()
    assert [copy.size_bytes for copy in plan.copies] == [19] * 3
    assert [push.size_bytes for push in plan.pushes] == [1] * 3
    assert plan.stored_bytes() == plan.cache_bytes.sum() == 60
    # Copies to 19, 38 and, once there is space when the first block is done at 24, 57; then 1 s to
    # write and 4 to attend.
    assert plan.evaluation.latency_s == 57 + 5
    # Of 3 x (10 + 20) bytes the weights are there, and two caches; and the values.
    assert plan.evaluation.devices[0].peak_bytes == 30 + 2 * 20 + 3
    assert plan.evaluation.lower_bound_s <= 57 + 5
    slow = OffloadOptions("accelerate", overlap=False, on_host=False, cache="all")
    plan = offloaded(graph, devices(100), Tiers(host()), slow)
    assert plan.evaluation.latency_s == 3 * (19 + 1 + 1 + 4)


def test_caches_are_moved_if_moving_weights_is_not_enough() -> None:
    graph = cached_blocks(4)  # 40 bytes of weights and 80 of caches
    # Besides all caches there is space for two copies of weights.
    plan = offloaded(graph, devices(105), Tiers(host()), PREFETCH)
    assert plan.cache_bytes.sum() == 0
    assert (plan.ways == STREAMED).any()
    # Even without weights there is not enough.
    plan = offloaded(graph, devices(85), Tiers(host()), PREFETCH)
    assert 0 < plan.cache_bytes.sum() < 80
    assert plan.evaluation.devices[0].peak_bytes <= 85
    assert plan.evaluation.latency_s >= plan.evaluation.lower_bound_s >= 120 - 4 - 85
    none = OffloadOptions("prefetch", on_host=False, cache="none")
    with pytest.raises(InfeasibleError, match="all weights that can be in tiers, tensors"):
        offloaded(graph, devices(85), Tiers(host()), none)
    with pytest.raises(InfeasibleError, match=r"tiers, which are full: host 10 B"):
        offloaded(graph, devices(85), Tiers(host(10)), PREFETCH)


def test_caches_go_instead_of_weights_if_that_is_faster() -> None:
    graph = cached_blocks(4, weight=40)  # 160 bytes of weights and 80 of caches
    # With 3 blocks of weights in the tier there are 40 + 80 bytes and two buffers of 40, with 3
    # caches 160 + 20 and two of 20.
    weights = OffloadOptions("prefetch", on_host=False, cache="none")
    plan = offloaded(graph, devices(223), Tiers(host()), weights)
    assert (plan.tier_bytes.sum(), plan.cache_bytes.sum()) == (120, 0)
    faster = offloaded(graph, devices(223), Tiers(host()), PREFETCH)
    assert faster.tier_bytes.sum() == faster.cache_bytes.sum() == 60
    assert faster.evaluation.latency_s < plan.evaluation.latency_s


def test_a_cache_read_before_it_is_written_is_copied_as_a_whole() -> None:
    sketch = Sketch()
    state = sketch.input(8)
    new = sketch.op([state], 8)
    sketch.op([state, new], 8, view_of=state)
    graph = sketch.graph(new)
    graph = replace(
        graph,
        moved_bytes=np.ones(2, dtype=np.int64),
        value_names=(f"{CACHE}state", *graph.value_names[1:]),
    )
    writes = cache_writes(graph)
    assert (writes.written_bytes[0], writes.copied_bytes[0], writes.last_op[0]) == (8, 8, 1)


def test_prompts_are_copied_to_the_device_if_the_host_is_slower() -> None:
    # A token takes 8 s on the host, 4 on the device and 10 for the copy; a hundred are 800 and 400.
    offload_plan = offloaded(blocks(6), devices(45), Tiers(host(speed=0.5)))
    hosted = int((offload_plan.ways == HOSTED).sum())
    assert hosted > 0
    plan = TieredPlan.of(offload_plan)
    alike = plan.placed(problem(blocks(6), devices(45)), offload_plan.assignment)
    assert alike.latency_s == offload_plan.evaluation.latency_s
    assert alike.held_bytes.tolist()[0] == offload_plan.evaluation.devices[0].peak_bytes
    assert alike.room_share <= 1
    prompts = problem(blocks(6, flops=400), devices(65))
    copied, as_placed = plan.prompts(prompts, offload_plan.assignment)
    assert as_placed.latency_s >= 6 * 400 + hosted * 400
    assert 6 * 400 < copied.latency_s <= 6 * 400 + 10
    assert copied.room_share <= 1
    # A device full of weights has no space for copies.
    full, _ = plan.prompts(problem(blocks(6, flops=400), devices(45)), offload_plan.assignment)
    assert full.room_share > 1


def test_everything_is_in_tiers_if_requested() -> None:
    machine = Machine(
        problem(cached_blocks(4), devices(85)), Tiers(host()), PREFETCH, (1.0, 0.0), times
    )
    plan = offload(machine, size_based, everything=True)
    assert (plan.ways == STREAMED).all()
    assert plan.stored_bytes() == 4 * (10 + 20)
    limit = most_offloaded(machine)
    assert limit is not None
    assert limit[1].latency_s == plan.evaluation.latency_s
    small = replace(machine, problem=problem(cached_blocks(4), devices(30)))
    assert most_offloaded(small) is None
