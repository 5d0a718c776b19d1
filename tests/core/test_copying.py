from __future__ import annotations

import threading

import pytest
import torch

from weightwire import copying
from weightwire.copying import copy_all, leaving_bandwidth
from weightwire.table import DTYPES

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Every bit random: NaNs of all kinds, subnormals and negative zeros among them."""
    generator = torch.Generator().manual_seed(0)
    nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.complex64, torch.complex128])
def test_equal_dtypes_are_copied_bit_for_bit(dtype, device):
    sources = [
        random_bits(dtype, (97, 31), device),
        random_bits(dtype, (64, 64), device).t(),
        random_bits(dtype, (50, 30), device)[::2, 1::3],
        random_bits(dtype, (), device),
        random_bits(dtype, (0, 3), device),
    ]
    into = [torch.zeros(source.shape, dtype=dtype, device=device) for source in sources]
    copy_all(into, sources)
    for to, source in zip(into, sources, strict=True):
        expected = source.contiguous().cpu().reshape(-1).view(torch.uint8)
        assert torch.equal(to.cpu().reshape(-1).view(torch.uint8), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_casts_are_torchs_own_and_may_stand_beside_copies(device):
    master = random_bits(torch.float32, (128, 33), device)
    same = random_bits(torch.bfloat16, (77,), device)
    into = [torch.zeros(128, 33, dtype=torch.bfloat16, device=device), torch.zeros_like(same)]
    copy_all(into, [master, same])
    assert torch.equal(into[0].view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
    assert torch.equal(into[1].view(torch.int16), same.view(torch.int16))


def test_a_lazily_conjugated_view_arrives_as_its_values():
    value = torch.randn(5, dtype=torch.complex64)
    into = torch.zeros_like(value)
    copy_all([into], [value.conj()])
    assert torch.equal(into, value.conj().resolve_conj())


def test_large_host_memory_is_copied_by_threads_that_end(monkeypatch):
    monkeypatch.setattr(copying, "_CHUNK", 1000)  # not a multiple of anything
    monkeypatch.setattr(copying, "_THREAD", 4096)
    sources = [random_bits(torch.bfloat16, (n,), "cpu") for n in (1, 499, 500, 501, 50_003)]
    into = [torch.zeros_like(source) for source in sources]
    before = threading.active_count()
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda t: (started.append(t), start(t)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    copy_all(into, sources)
    assert len(started) == 2
    assert threading.active_count() == before
    for to, source in zip(into, sources, strict=True):
        assert torch.equal(to.view(torch.int16), source.view(torch.int16))


def test_autograd_hears_of_a_copy():
    parameter = torch.nn.Parameter(torch.zeros(3))
    before = parameter._version
    copy_all([parameter], [torch.ones(3)])
    assert parameter._version > before
    assert parameter.tolist() == [1, 1, 1]


def test_other_shapes_are_torchs_to_judge():
    into = torch.zeros(2, 3)
    copy_all([into], [torch.ones(3)])
    assert into.tolist() == [[1, 1, 1]] * 2
    with pytest.raises(RuntimeError, match="size"):
        copy_all([into], [torch.zeros(3, 2)])


@pytest.mark.parametrize("leaves", [False, True])
def test_what_torch_fuses_is_of_one_pair_of_dtypes_and_large_only_to_leave_bandwidth(
    leaves, monkeypatch
):
    large = random_bits(torch.bfloat16, (100, 100), "cpu")
    sources = [
        large,
        *(random_bits(torch.float32, (3, n), "cpu") for n in (1, 2, 3)),
        *(random_bits(torch.float16, (4, n), "cpu") for n in (5, 6)),
        random_bits(torch.bfloat16, (7, 8), "cpu").t(),
        random_bits(torch.float32, (5,), "cpu"),
    ]
    into = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    into[-1] = into[-1].bfloat16()
    fused = []
    real = torch._foreach_copy_

    def recording(targets, values, **more):
        fused.append(
            [(tuple(to.shape), to.dtype, of.dtype) for to, of in zip(targets, values, strict=True)]
        )
        real(targets, values, **more)

    monkeypatch.setattr(torch, "_foreach_copy_", recording)
    monkeypatch.setattr(copying, "_is_one_span", lambda to, source: source is large)
    with leaving_bandwidth(leaves):
        copy_all(into, sources)
    small = [((4, 5), torch.int16, torch.int16), ((4, 6), torch.int16, torch.int16)]
    assert sorted(fused, key=str) == sorted(
        [
            [((100, 100), torch.int16, torch.int16), *small] if leaves else small,
            [((3, n), torch.int32, torch.int32) for n in (1, 2, 3)],
            [((8, 7), torch.int16, torch.int16)],  # not laid out alike
            [((5,), torch.bfloat16, torch.float32)],
        ],
        key=str,
    )
    for to, source in zip(into[:-1], sources[:-1], strict=True):
        assert torch.equal(to.view(torch.uint8), source.contiguous().view(torch.uint8))
