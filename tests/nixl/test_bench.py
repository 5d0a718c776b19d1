from __future__ import annotations

import pytest

from weightwire.errors import ConfigError
from weightwire_nixl import bench


def test_the_benchmark_measures_verified_transfers(capfd):
    figures = bench.run(4_000_000, [], repeats=1, threads=None)
    assert figures["backend"] == "nixl"
    assert figures["tensors"] == 84
    assert abs(figures["nbytes"] - 4_000_000) < 40_000
    modes = set(figures["first"])
    assert modes == {"staged", "zero_copy", "unverified"}
    assert set(figures["median"]) == modes | {
        "raw_stage",
        "raw_move",
        "raw_move_live",
        "raw_replay",
    }
    assert set(figures["times_raw"]) == modes
    assert all(seconds > 0 for seconds in figures["median"].values())
    assert figures["path"]["staged"].startswith("nixl (pull over CMA")
    assert figures["path"]["staged"].endswith("; UCX's own choice of devices)")
    assert figures["signal"]["median"] > 0
    assert figures["posting"]["descriptors"] == 10_000
    bench.show(figures)
    assert "a signal and its answer" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 2}, "neither directories nor threads"),
        ({"device": "cuda:99"}, "GPUs here"),
        ({"device": "tape"}, "isn't one"),
    ],
)
def test_what_it_cannot_measure_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        bench.run(4_000_000, [], repeats=1, **{"threads": None, **arguments})
