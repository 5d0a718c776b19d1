from __future__ import annotations

import pytest
import torch

from weightwire.errors import BackendUnavailable, ConfigError
from weightwire_nccl import bench


def test_the_benchmark_measures_verified_transfers(tmp_path):
    figures = bench.run(2_000_000, [], repeats=1, threads=None, device="cpu")
    assert figures["backend"] == "nccl"
    assert figures["library"] == "gloo"
    assert figures["tensors"] == 84
    assert abs(figures["nbytes"] - 2_000_000) < 40_000
    assert set(figures["median"]) == {"transfer", "unverified", "tiny", "raw_broadcast"}
    assert figures["share_of_raw"] > 0


def test_the_benchmark_refuses_what_it_cant_measure(tmp_path):
    with pytest.raises(ConfigError):
        bench.run(1000, [tmp_path], repeats=1, threads=None)
    if torch.cuda.device_count() < 2:
        with pytest.raises(BackendUnavailable, match="two GPUs"):
            bench.run(1000, [], repeats=1, threads=None, device="cuda")
