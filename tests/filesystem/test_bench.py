from __future__ import annotations

import sys

import pytest

from weightwire_filesystem import bench


@pytest.mark.skipif(sys.platform != "linux", reason="reads its peak from /proc")
def test_the_benchmark_measures_verified_transfers(tmp_path):
    figures = bench.run(4_000_000, [tmp_path], repeats=1, threads=2)
    assert figures["backend"] == "filesystem"
    assert figures["tensors"] == 84
    assert abs(figures["nbytes"] - 4_000_000) < 40_000
    assert figures["seconds"]["median"] > 0
    assert set(figures["raw"]) == {
        "memcpy", "raw_write", "raw_read",
        "safetensors_save", "safetensors_load", "safetensors_copy",
    }  # fmt: skip
    assert isinstance(figures["verify_cost"], float)
    assert list(tmp_path.iterdir()) == []
