"""Covers of strided views, against a mask of every element."""

from __future__ import annotations

import pytest
import torch

from weightwire.trace.cover import Cover, Extent


def cover(tensor, *views):
    found = Cover(Extent.of(tensor))
    for view in views:
        found.add(Extent.of(view))
    return found


def touched(tensor, *views):
    tensor.zero_()
    for view in views:
        view.fill_(1)
    return tensor.bool()


def bases():
    return [
        torch.zeros(4, 6, 5),
        torch.zeros(6, 4).t(),
        torch.zeros(()),
        torch.zeros(1, 7, 1),
        torch.zeros(3, 8)[:, 2:7],
        torch.zeros(0, 3),
    ]


def views_of(t):
    if t.dim() == 0:
        return [t, t.view(1), t.unsqueeze(0)]
    views = [t, t.narrow(0, 0, t.shape[0] // 2), t[t.shape[0] // 2 :]]
    if t.dim() > 1 and t.numel():
        views += [t.select(1, 0), t[:, 1:], t.transpose(0, 1), t.unbind(0)[-1], t[..., ::2]]
        views += list(t.chunk(2, 1))
        if t.is_contiguous():
            views += [t.view(-1), t.view(-1)[1:7], t.unsqueeze(1)]
    return views


@pytest.mark.parametrize("base", range(len(bases())))
def test_covers_agree_with_masks(base):
    tensor = bases()[base]
    views = views_of(tensor)
    for i, one in enumerate(views):
        for other in views[i:]:
            mask = touched(tensor, one, other).clone()
            both = cover(tensor, one, other)
            assert both.complete == bool(mask.all())
            for third in views:
                single = touched(tensor, third)
                assert both.lacks(cover(tensor, third)) == bool((single & ~mask).any())


def test_large_tensors_need_no_mask():
    tensor = torch.empty(512, 40_000, 30_000, device="meta")
    halves = [view for expert in tensor.unbind(0) for view in expert.chunk(2, 0)]
    assert cover(tensor, *halves).complete
    assert not cover(tensor, *halves[:-1]).complete
