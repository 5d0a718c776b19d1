"""API servers, driven by a pool, by vLLM's own HTTP routes, and followed by a watcher."""

from __future__ import annotations

import contextlib
import urllib.request

import pytest
from server_rig import Load, Server, checkpoint, model
from watch_rig import Watch

import weightwire
from weightwire.errors import AuthenticationError, ConfigError, PeerLost
from weightwire.vllm import Pool, TrainerInfo, UpdateFailed

KEY = "not-a-secret"
PROMPT = [5, 6, 7, 9]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One on A, one on B that wants a key; with what each holds and says when it is cold."""
    root = tmp_path_factory.mktemp("servers")
    made = {
        "A": Server(checkpoint("A", root), root / "A.log"),
        "B": Server(checkpoint("B", root), root / "B.log", key=KEY),
    }
    try:
        for server in made.values():
            server.start()
        for server in made.values():
            server.ready()
        yield made
    finally:
        for server in made.values():
            server.client.close()
            server.stop()


@pytest.fixture(scope="module")
def cold(servers):
    return {
        which: (server.checksums(), server.generate(PROMPT)["token_ids"])
        for which, server in servers.items()
    }


@pytest.fixture
def session(tmp_path):
    return f"file://{tmp_path / 'run'}"


def holds(server, expected):
    assert server.checksums() == expected[0]
    assert server.generate(PROMPT)["token_ids"] == expected[1]


def sender_of(session, which, **options):
    return weightwire.open_sender("filesystem", session=session, source=model(which), **options)


def spans(answers):
    return [choice["weight_versions"] for choice in map(Server.generated, answers)]


def test_a_pool_of_two_gets_versions_under_load(servers, cold, session):
    assert cold["A"] != cold["B"]
    a, b = servers["A"], servers["B"]
    urls = [a.url, b.url]
    with (
        Pool(urls, session=session, backend="filesystem", timeout=60) as pool,
        pytest.raises(AuthenticationError, match="api-key-env"),
    ):
        pool.attach()
    with Pool(urls, session=session, backend="filesystem", api_key=KEY, timeout=60) as pool:
        pool.attach()
        assert set(pool.in_service) == set(urls)
        with sender_of(session, "B") as sender:
            sender.send(1)
        with Load(a) as load:
            report = pool.update(1)
            assert set(report.updated) == set(urls)
            assert pool.in_service == dict.fromkeys(urls, 1)
            assert all(0 < r.paused_seconds < 60 for r in report.updated.values())
            load.goes_on(6)
        # Each token is named after the policy it was sampled from, in one request, too.
        for request in spans(load.answers):
            assert [span["version"] for span in request] in (
                ["default"],
                ["default", "1"],
                ["1"],
            )
        for server in (a, b):
            assert not server.paused
            holds(server, cold["B"])
            assert server.version == "1"
        assert pool.update(1).held == tuple(urls)
        for version, mode in ((2, "wait"), (3, "abort")):
            with sender_of(session, "A" if version == 2 else "B") as sender:
                sender.send(version)
            with Load(a) as load:
                pool.update(version, mode=mode)
                load.goes_on(3)
            assert any(answer.status_code == 200 for answer in load.answers)
            for server in (a, b):
                holds(server, cold["A" if version == 2 else "B"])
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


def damage(run):
    """Flip a bit of the newest version's last tensor."""
    newest = max((run / "versions").iterdir(), key=lambda path: path.name)
    path = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([last[0] ^ 1]))


def test_generating_during_an_open_update_is_refused_and_not_fatal(servers, cold, session):
    a = servers["A"]
    info = {"session": session, "backend": "filesystem", "receiver_id": "r", "timeout": 30}
    bad = a.post("/init_weight_transfer_engine", {"init_info": {**info, "colour": "red"}})
    assert bad.status_code == 500
    assert "init_info.colour" in bad.text
    a.call("/init_weight_transfer_engine", {"init_info": info})
    with sender_of(session, "B") as sender:
        sender.send(1)
    with Load(a):
        a.call("/start_weight_update")
        running = a.post("/update_weights", {"update_info": {"version": 1}})
        assert running.status_code == 500
        assert "pause the engine first" in running.text
    a.call("/update_weights", {"update_info": {"version": 1}})
    assert a.ask(PROMPT, 4).status_code == 500
    assert "an update is open" in a.post("/resume").text
    a.call("/finish_weight_update", {"weight_version": "1"})
    a.call("/reset_prefix_cache")
    holds(a, cold["B"])
    a.call("/shutdown_weight_transfer_engine")


def test_vllms_own_trainer_client_switches_by_a_name(servers, cold, session):
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


def test_a_watcher_follows_through_restarts_and_ends_in_good_order(servers, cold, session):
    a = servers["A"]
    options = ("--session", session, "--engine", f"r={a.url}", "--timeout", "40")
    with contextlib.ExitStack() as stack:
        watch = Watch(*options, "--metrics-port", "0")
        stack.callback(watch.close)
        watch.await_("attached")
        sender = sender_of(session, "B")
        stack.callback(sender.close)
        sender.send(1)
        line = watch.await_("version", version=1)
        assert line["failed"] == {}
        assert set(line["engines"]) == {a.url}
        holds(a, cold["B"])
        assert a.version == "1"
        metrics = watch.await_("metrics")["message"]
        with urllib.request.urlopen(metrics) as answer:
            page = answer.read().decode()
        assert f'weightwire_watch_version{{engine="{a.url}"}} 1.0' in page
        assert f'weightwire_watch_in_service{{engine="{a.url}"}} 1.0' in page

        second = Watch(*options)
        stack.callback(second.close)
        assert second.end(None) == 1
        assert "is watched already" in second.error

        # The trainer restarts, and the server: it comes back with the checkpoint's weights.
        sender.close()
        watch.lines.clear()
        a.stop()
        watch.await_("waiting")
        a.start()
        a.ready()
        watch.await_("attached")
        sender = sender_of(session, "B", resume_from=1)
        stack.callback(sender.close)
        watch.await_("version", version=1)
        holds(a, cold["B"])
        assert not a.paused
        # The watcher restarts: nothing is done twice.
        assert watch.end() == 0
        third = Watch(*options)
        stack.callback(third.close)
        sender.send(2)
        third.await_("version", version=2)
        assert a.version == "2"
        assert third.end() == 0
        assert [line["version"] for line in third.lines if line["event"] == "version"] == [2]


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
