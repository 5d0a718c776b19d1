"""Engines of a process of its own: ``AsyncLLM`` in a pool, and the worker extension."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from server_rig import in_a_group, is_caught

CHILD = Path(__file__).with_name("in_process_child.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    said = in_a_group([sys.executable, str(CHILD), str(tmp_path_factory.mktemp("engines"))])
    return json.loads(said.partition("SEEN ")[2].splitlines()[0])


def test_an_async_engine_in_a_pool_follows_in_each_pause_mode(seen):
    cold = {which: seen[f"cold {which}"][1] for which in "AB"}
    followed = seen["async"]
    assert followed["cold A"] == cold["A"]
    alone = followed["alone"]["token_ids"]
    policies, caught = {"default": "A"}, set()
    for version, update in enumerate(followed["updates"], 1):
        policies[str(version)] = update["which"]
        assert update["holds"] == cold[update["which"]]
        assert update["updated"] == [["AsyncLLM", version]]
        for answer in update["answers"]:
            versions = [span["version"] for span in answer["weight_versions"]]
            now = [str(version)]
            before = [str(version - 1) if version > 1 else "default"]
            if update["mode"] == "keep":
                assert versions in (before, before + now, now)
            else:
                assert versions in (before, now)
            if is_caught(answer, update["mode"]):
                caught.add(update["mode"])
            for span in answer["weight_versions"][:1]:
                end = span["end"]
                if policies[span["version"]] == "A":
                    assert answer["token_ids"][:end] == alone[:end]
            whole = answer["finish_reason"] == "length"
            assert whole == (len(answer["token_ids"]) == len(alone))
            assert whole or (answer["finish_reason"], update["mode"]) == ("abort", "abort")
    assert caught == {"keep", "wait", "abort"}
    assert followed["in service"] == {"AsyncLLM": version}


def test_a_watcher_refuses_a_server_without_its_routes(seen):
    code, error = seen["async"]["watch"]
    assert code == 1
    assert "VLLM_SERVER_DEV_MODE=1" in error
    assert "Traceback" not in error


def test_collective_rpc_updates_an_engine_without_a_transfer_config(seen):
    assert seen["cold A"] != seen["cold B"]
    assert seen["updated"] == seen["cold B"]
    assert seen["version"] == [7]
    assert "init_info.colour" in seen["wrong"]
