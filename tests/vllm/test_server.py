"""API servers, driven by a pool and by vLLM's own HTTP routes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from server_rig import PROMPT, Load, Server, become, damage, holds, model, sender_of

import weightwire
from weightwire.errors import AuthenticationError, ConfigError, PeerLost
from weightwire.vllm import Pool, UpdateFailed


def spans(answers):
    return [choice["weight_versions"] for choice in map(Server.generated, answers)]


def test_a_pool_of_two_shapes_gets_versions_under_load(servers, cold, session):
    assert cold["A"].checksums.keys() == cold["B"].checksums.keys()
    assert not cold["A"].checksums.items() & cold["B"].checksums.items()
    a, b = servers["A"], servers["B"]
    urls = [a.url, b.url]
    with (
        Pool(urls, session=session, backend="filesystem", timeout=60) as pool,
        pytest.raises(AuthenticationError, match="api-key-env"),
    ):
        pool.attach()
    with Pool(urls, session=session, backend="filesystem", api_key=b.key, timeout=60) as pool:
        pool.attach()
        assert set(pool.in_service) == set(urls)
        before = {server: server.version for server in (a, b)}
        with sender_of(session, "B") as sender:
            sender.send(1)
        with Load(a) as load, Load(b) as other:
            report = pool.update(1)
            assert set(report.updated) == set(urls)
            assert pool.in_service == dict.fromkeys(urls, 1)
            assert all(0 < r.paused_seconds < 60 for r in report.updated.values())
            load.goes_on(3)
            other.goes_on(3)
        for server, sent in ((a, load), (b, other)):
            old = before[server]
            for request in spans(sent.answers):
                assert [span["version"] for span in request] in ([old], [old, "1"], ["1"])
            assert not server.paused
            holds(server, cold["B"])
            assert server.version == "1"
        assert pool.update(1).held == tuple(urls)
        pool.detach()


@pytest.mark.parametrize("backend", ["nixl", "nccl"])
def test_a_pool_follows_a_sender_that_waits_for_it(servers, cold, session, backend):
    a, b = servers["A"], servers["B"]
    source = model("A")
    with (
        Pool([a.url, b.url], session=session, backend=backend, api_key=b.key, timeout=60) as pool,
        ThreadPoolExecutor(1) as beside,
    ):
        pool.attach()
        with weightwire.open_sender(backend, session=session, source=source, timeout=60) as sender:
            for version, which in ((1, "A"), (2, "B")):
                become(source, which)
                sending = beside.submit(sender.send, version)
                with Load(a):
                    assert len(pool.update(version).updated) == 2
                assert sending.result(timeout=60).version == version
                for server in (a, b):
                    holds(server, cold[which])
                    assert server.version == str(version)
        pool.detach()


def test_a_failed_update_leaves_the_engine_alive_paused_and_out(servers, cold, session, tmp_path):
    a = servers["A"]
    with Pool({"r": a.url}, session=session, backend="filesystem", timeout=40) as pool:
        pool.attach()
        with sender_of(session, "A") as sender:
            sender.send(1)
            pool.update(1)
            sender.send(2)
            damage(tmp_path / "run")
            with pytest.raises(UpdateFailed, match="version 2") as caught:
                pool.update(2)
        assert a.url in caught.value.report.failed
        assert pool.out.keys() == {a.url}
        assert pool.in_service == {}
        assert a.paused
        assert a.client.get("/health").status_code == 200
        # All of it was one group, and nothing of it was written: the old version may serve.
        assert pool.replicas["r"].whole
        a.call("/resume")
        holds(a, cold["A"])
        # Now layers were in place before the damage was found.
        with sender_of(session, "B", group_bytes=1 << 14) as sender:
            sender.send(3)
            damage(tmp_path / "run")
            with pytest.raises(UpdateFailed, match="version 3"):
                pool.update(3)
        assert not pool.replicas["r"].whole
        refused = a.post("/resume")
        assert refused.status_code == 500
        assert "two versions" in refused.text
        assert a.paused
        with sender_of(session, "B") as sender:
            sender.send(4)
            pool.update(4)
        assert pool.in_service == {a.url: 4}
        holds(a, cold["B"])
        pool.detach()


def test_one_of_two_data_parallel_ranks_that_fails_keeps_both_out(servers, cold, session):
    b = servers["B"]
    with Pool(
        {"r": b.url}, session=session, backend="filesystem", api_key=b.key, timeout=60
    ) as pool:
        pool.attach()
        with sender_of(session, "A") as sender:
            sender.send(1)
            pool.update(1)
        b.call("/collective_rpc", {"method": "break_one", "args": ["1"]})
        with sender_of(session, "B") as sender:
            sender.send(2)
            with pytest.raises(UpdateFailed, match="no memory for packing"):
                pool.update(2)
            assert pool.in_service == {}
            assert b.paused
            assert b.post("/resume").status_code == 500
            assert pool.update(2).updated[b.url].version == 2
        assert not b.paused
        holds(b, cold["B"])
        pool.detach()


def test_generating_during_an_open_update_is_refused_and_not_fatal(servers, cold, session):
    a = servers["A"]
    info = {"session": session, "backend": "filesystem", "receiver_id": "r", "timeout": 30}
    bad = a.post("/init_weight_transfer_engine", {"init_info": {**info, "colour": "red"}})
    assert bad.status_code == 500
    assert "init_info.colour" in bad.text
    a.call("/init_weight_transfer_engine", {"init_info": info})
    with Load(a, threads=5):
        for version in range(1, 20):
            with sender_of(session, "B") as sender:
                sender.send(version)
            a.call("/start_weight_update")
            running = a.post("/update_weights", {"update_info": {"version": version}})
            if running.status_code == 500:
                break
            # Rightly: all requests had ended at once, and the next weren't there yet.
            a.call("/finish_weight_update", {"weight_version": str(version)})
        assert "pause the engine first" in running.text
    a.call("/update_weights", {"update_info": {"version": version}})
    assert a.ask(PROMPT, 4).status_code == 500
    assert "an update is open" in a.post("/resume").text
    a.call("/finish_weight_update", {"weight_version": str(version)})
    a.call("/reset_prefix_cache")
    holds(a, cold["B"])
    a.call("/shutdown_weight_transfer_engine")


def test_vllms_own_trainer_client_switches_by_a_name(servers, cold, session):
    from weightwire.vllm import TrainerInfo

    transfer = pytest.importorskip("vllm.distributed.weight_transfer")
    a = servers["A"]
    client = transfer.HTTPVLLMWeightSyncClient(a.url)
    info = TrainerInfo(session=session, inner="memory", timeout=40, rank=0)
    trainer = transfer.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=transfer.ModuleSource(model("A"))
    )
    try:
        trainer.send_weights(9)
        a.call("/reset_prefix_cache")
        holds(a, cold["A"])
        assert a.version == "9"
        client.shutdown_weight_transfer_engine()
    finally:
        trainer.shutdown()


def test_a_pool_says_what_is_wrong_with_its_arguments(session):
    for engines, word in (([], "needs engines"), (["nonsense"], "http://"), ("http://a", "list")):
        with pytest.raises(ConfigError, match=word):
            Pool(engines, session=session, backend="filesystem")
    with pytest.raises(ConfigError, match="mode"):
        Pool(["http://a"], session=session, backend="filesystem", mode="stop")
    with pytest.raises(ConfigError, match=r"init_info\.lease_ttl"):
        Pool(["http://a"], session=session, backend="filesystem", lease_ttl=-1)
    with (
        Pool(["http://127.0.0.1:9"], session=session, backend="filesystem", timeout=5) as pool,
        pytest.raises(PeerLost, match="can't be reached"),
    ):
        pool.attach()
