"""Copies into staging memory: values, casts, reuse; between devices where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from weightwire.layout import lay_out
from weightwire.staging import Scratch, Stager, _pieces

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def sources(device):
    """Of many dtypes and strides."""
    base = torch.arange(4096, device=device).view(64, 64)
    yield base.float() + 1 / 3, torch.bfloat16
    yield (base.float() + 1 / 3).t(), torch.bfloat16
    yield base.bfloat16()[::2, 1::3], torch.bfloat16
    yield base, torch.int64
    yield base > 7, torch.bool
    yield base.float()[:1].expand(5, 64), torch.float16
    yield base.to(torch.uint8)[0, 3], torch.uint8
    yield base[:0].float(), torch.bfloat16
    yield torch.full((9,), float("nan"), dtype=torch.bfloat16, device=device), torch.bfloat16


@pytest.mark.parametrize("to", DEVICES)
@pytest.mark.parametrize("of", DEVICES)
@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=gpu)])
def test_what_is_staged_has_the_values_and_the_wire_dtype(of, to, pinned):
    given = list(sources(of))
    places, nbytes = lay_out([(dtype, tuple(tensor.shape)) for tensor, dtype in given])
    pin = pinned and to == "cpu"
    slot = torch.empty(nbytes, dtype=torch.uint8, device=to, pin_memory=pin)
    stager = Stager()
    for _ in range(3):  # the bounce buffer and the stream are used again
        slot.fill_(0xFF)
        views = [place.view(slot) for place in places]
        stager.copy(views, [tensor for tensor, _ in given])
        for view, (tensor, dtype) in zip(views, given, strict=True):
            expected = tensor.to(dtype).cpu().contiguous().view(-1).view(torch.uint8)
            assert torch.equal(view.cpu().view(-1).view(torch.uint8), expected)
    stager.release()


@gpu
def test_a_copy_follows_what_the_caller_has_queued_and_no_device_is_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("device-wide wait"))
    weight = torch.zeros(1 << 22, device="cuda")
    slot = torch.empty(1 << 22, dtype=torch.bfloat16, device="cuda")
    host = torch.empty(1 << 22, dtype=torch.bfloat16)
    stager = Stager()
    for step in range(1, 6):
        for _ in range(200):
            weight.add_(1)
        stager.copy([slot, host], [weight, weight])
        assert torch.equal(host, torch.full_like(host, 200 * step))
        assert torch.equal(slot.cpu(), host)


@pytest.mark.parametrize("most", [1, 64, 1000, 1 << 20])
def test_long_tensors_cross_in_pieces_that_hold_everything_once(most):
    given = [tensor for tensor, _ in sources("cpu") if tensor.dim()]
    into = [torch.zeros(tuple(tensor.shape), dtype=torch.float32) for tensor in given]
    for targets, chosen in _pieces(into, [tensor.float() for tensor in given], most):
        longest = max((to[0].nbytes for to in targets if len(to)), default=0)
        assert sum(target.nbytes for target in targets) <= max(most, longest)
        for target, source in zip(targets, chosen, strict=True):
            target.add_(source)
    for target, tensor in zip(into, given, strict=True):
        assert torch.equal(target.nan_to_num(), tensor.float().nan_to_num())


def test_scratch_is_reused_grows_and_can_be_fresh():
    scratch = Scratch()
    first = scratch.take(100)
    assert scratch.take(60).data_ptr() == first.data_ptr()
    assert scratch.take(1000).numel() >= 1000
    kept = scratch.take(10)
    assert scratch.take(10, fresh=True).data_ptr() != kept.data_ptr()
    scratch.release()
