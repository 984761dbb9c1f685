from __future__ import annotations

import torch

from lazysched.profiles.live_bytes import LiveBytes


def test_counts_new_storages_once_while_they_live() -> None:
    old = torch.ones(1000)  # 4000 bytes that were there before
    with LiveBytes() as meter:
        assert meter.live_bytes() == 0
        view = old.view(10, 100)
        assert meter.live_bytes() == 0
        doubled = old * 2
        row = doubled.view(10, 100)[0]
        assert meter.live_bytes() == 4000
        del doubled
        assert meter.live_bytes() == 4000  # the row still holds the storage
        temporary = view.double()
        assert meter.live_bytes() == 12000
        del temporary
        assert (meter.live_bytes(), meter.peak_bytes()) == (4000, 12000)
        meter.reset_peak()
        old.add_(1)
        assert meter.peak_bytes() == 4000
        del row
        assert (meter.live_bytes(), meter.peak_bytes()) == (0, 4000)


def test_sees_what_a_backward_makes_and_frees() -> None:
    leaf = torch.ones(100, requires_grad=True)
    with LiveBytes() as meter:
        total = (leaf * leaf).exp().sum()  # 400 bytes kept by exp and the sum; the product is gone
        assert (meter.live_bytes(), meter.peak_bytes()) == (404, 800)
        meter.reset_peak()
        (grad,) = torch.autograd.grad(total, leaf)
        # On top come the sum's gradient, 4 bytes, and at most two gradients of 400 bytes at once.
        assert grad.nbytes == 400
        assert (meter.live_bytes(), meter.peak_bytes()) == (404, 1208)
