"""Bytes of live storages, counted by hand: 4 float32 numbers are 16 bytes."""

import torch

from fxpart.capture.live_bytes import LiveBytes, storage_sizes


def four() -> torch.Tensor:
    return torch.ones(4)


def test_a_storage_counts_once_for_all_its_tensors() -> None:
    whole, other = four(), torch.ones(2)
    sizes = storage_sizes([whole, whole[1:], whole.view(2, 2), other])
    assert sorted(sizes.values()) == [8, 16]


def test_the_peak_counts_simultaneously_live_tensors() -> None:
    with LiveBytes([{}]) as counter:
        a = four()
        b = a + a  # 32 bytes live
        del a
        c = b + b  # 32 again
        del b, c
        four()
    assert counter.peak_bytes == (32,)


def test_a_view_keeps_its_storage_alive_and_allocates_nothing() -> None:
    with LiveBytes([{}]) as counter:
        a = four()
        part = a[:1]
        del a
        b = four()  # 32: the view still holds 16
        del part, b
        big = torch.ones(7)  # 28 alone
        del big
    assert counter.peak_bytes == (32,)


def test_a_storage_belongs_to_the_device_that_created_it() -> None:
    with LiveBytes([{}, {}, {}]) as counter:
        a = four()
        with counter.on(1):
            b = a + a
            with counter.on(2):
                c = b.clone()
            d = a * b
        del b, c, d
        e = a.clone()
        del a, e
    assert counter.peak_bytes == (32, 32, 16)


def test_resident_tensors_count_from_the_start_and_once() -> None:
    weight = four()
    resident = storage_sizes([weight])
    with LiveBytes([resident, resident]) as counter:
        view = weight.view(2, 2)
        total = view + 1
        del total
    assert counter.peak_bytes == (32, 16)


def test_temporaries_of_operators_count() -> None:
    x, weight = torch.ones(1, 4), torch.ones(4)
    with LiveBytes([storage_sizes([x, weight])]) as counter:
        result = torch.nn.functional.layer_norm(x, (4,), weight)
    # 32 given, 16 of the result, 4 each for the mean and the deviation, which are also returned.
    assert counter.peak_bytes == (32 + 16 + 8,)
    assert result.shape == (1, 4)


def test_resetting_the_peak_keeps_live_tensors() -> None:
    with LiveBytes([{}]) as counter:
        a = four()
        b = four()
        del b
        assert (counter.live_bytes, counter.peak_bytes) == ((16,), (32,))
        counter.forget_peak()
        assert counter.peak_bytes == (16,)
        c = torch.ones(1)
        del a, c
    assert (counter.live_bytes, counter.peak_bytes) == ((0,), (20,))
