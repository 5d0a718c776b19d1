"""An adapter behind vLLM's API server follows its trainer under ``weightwire watch``."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lora_policy import step, trainer
from server_rig import PROMPT, Server, checkpoint, model
from watch_rig import Watch

import weightwire

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra 'examples'")


@contextlib.contextmanager
def serving(place: Path, adapter: Path):
    server = Server(
        checkpoint("A", place), place / "server.log", "--enable-lora", "--max-lora-rank", "8",
        "--lora-modules", f"policy={adapter}",
    )  # fmt: skip
    server.start()
    try:
        server.ready()
        yield server
    finally:
        server.stop()


def said(server: Server, name: str) -> list[int]:
    asked = {**server._asking(PROMPT, 16), "model": name}
    return server.generated(server.post("/inference/v1/generate", asked))["token_ids"]


@pytest.mark.soak
def test_a_served_adapter_follows_its_trainer(tmp_path):
    policy = trainer(model("A"))
    policy.save_pretrained(tmp_path / "first")
    session = f"file://{tmp_path / 'run'}"
    with (
        serving(tmp_path, tmp_path / "first") as server,
        weightwire.open_sender(
            "filesystem", session=session, source=weightwire.LoraAdapter(policy)
        ) as sender,
    ):
        base, first = said(server, "tiny"), said(server, "policy")
        assert base != first
        file = tmp_path / "first" / "adapter_config.json"
        watch = Watch(
            "--session", session, "--engine", f"http://127.0.0.1:{server.port}",
            "--adapter", f"1={file}",
        )  # fmt: skip
        try:
            watch.await_("attached")
            for version in (1, 2):
                step(policy)
                sender.send(version)
                watch.await_("version", version=version)
            now = said(server, "policy")
            assert now != first
            assert said(server, "tiny") == base
            assert watch.end() == 0
        finally:
            watch.close()
    policy.save_pretrained(tmp_path / "last")
    with serving(tmp_path, tmp_path / "last") as server:
        assert said(server, "policy") == now
