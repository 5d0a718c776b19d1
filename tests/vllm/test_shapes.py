"""Servers of several ranks beside one of one rank, in one session: each is as one just started."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_rig import PROMPT, Load, Server, become, checkpoint, model

import weightwire
from weightwire.vllm import Pool

TP, DP = ("--tensor-parallel-size", "2"), ("--data-parallel-size", "2")


# No data-parallel mixture of experts: vLLM's CPU build fails in the dummy batches that its
# ranks run to keep in step, in /pause as in any generation, and its cores end.  In process
# they are updated in test_data_parallel.py.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3", TP), ("qwen3", DP), ("qwen3_moe", TP)],
    ids=["qwen3 tp=2", "qwen3 dp=2", "qwen3_moe tp=2"],
)
@pytest.mark.parametrize("backend", ["filesystem", "nixl"])
def test_an_updated_server_is_as_one_just_started(tmp_path, session, kind, options, backend):
    paths = {which: checkpoint(which, tmp_path, kind) for which in "AB"}
    shapes = {"warm": ("A", options), "cold": ("B", options), "one": ("A", ())}
    made = {
        name: Server(paths[which], tmp_path / f"{name}.log", *of_shape)
        for name, (which, of_shape) in shapes.items()
    }
    with contextlib.ExitStack() as stack:
        for server in made.values():
            stack.callback(server.client.close)
            stack.callback(server.stop)
            server.start()
        for server in made.values():
            server.ready()
        warm, cold, one = made.values()
        fresh = {"A": seen(warm), "B": seen(cold)}
        assert not fresh["A"][0].items() & fresh["B"][0].items()
        cold.stop()
        source = model("A", kind)
        pool = stack.enter_context(
            Pool([warm.url, one.url], session=session, backend=backend, timeout=60)
        )
        pool.attach()
        beside = stack.enter_context(ThreadPoolExecutor(1))
        sender = stack.enter_context(
            weightwire.open_sender(backend, session=session, source=source, timeout=60)
        )
        for version, which in enumerate("BA", start=1):
            become(source, which, kind)
            sending = beside.submit(sender.send, version)
            with Load(warm), Load(one):
                report = pool.update(version)
            sending.result(timeout=60)
            assert len(report.updated) == 2
            warm.call("/reset_prefix_cache")
            assert seen(warm) == fresh[which]


def seen(server):
    return server.checksums_of_ranks(), server.generate(PROMPT, 16)["token_ids"]
