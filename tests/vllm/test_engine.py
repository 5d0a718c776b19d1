"""vLLM's own weight transfer calls, over a real backend and session."""

from __future__ import annotations

import pytest
from server_rig import damage

import weightwire
from weightwire.errors import (
    ConfigError,
    HandleError,
    TableMismatch,
    TransferError,
    TransferTimeout,
)
from weightwire_vllm import inprocess
from weightwire_vllm.models import tiny_model
from weightwire_vllm.plugin import register


@pytest.fixture
def session(tmp_path):
    return f"file://{tmp_path / 'run'}"


@pytest.fixture
def attached(lab, session):
    inprocess.attach(
        lab.llm, session=session, backend="filesystem", receiver_id="replica-0", timeout=20
    )
    yield lab
    inprocess.detach(lab.llm)


def send(session, model, version):
    with weightwire.open_sender("filesystem", session=session, source=model) as sender:
        return sender.send(version=version)


def test_registration_is_idempotent():
    register()
    register()


def test_engine_follows_the_trainer(attached, session):
    lab = attached
    with weightwire.open_sender("filesystem", session=session, source=lab.models["B"]) as sender:
        sender.send(version=1)
        inprocess.update(lab.llm)
        lab.is_("B")
        # Asked again, it is answered and not fetched again.
        inprocess.update(lab.llm, version=1, timeout=0.5)
        lab.is_("B")
        with pytest.raises(TransferTimeout):
            inprocess.update(lab.llm, version=2, timeout=0.5)
        lab.is_("B")
        sender.send(version=2)
        inprocess.update(lab.llm, version=2)
        lab.is_("B")
        if hasattr(lab.llm, "get_weight_version"):  # vLLM 0.26 knows no versions
            assert lab.llm.get_weight_version() == "2"
    send(session, lab.models["A"], 3)
    inprocess.update(lab.llm)
    lab.is_("A")


def test_an_older_offer_than_asked_for_is_left_alone(attached, session):
    lab = attached
    before = lab.now()
    send(session, lab.models["B"], 1)
    with pytest.raises(TransferTimeout):
        inprocess.update(lab.llm, version=2, timeout=0.5)
    assert lab.now() == before
    inprocess.update(lab.llm, version=1)
    lab.is_("B")


def test_a_damaged_version_leaves_an_engine_that_recovers(attached, session, tmp_path):
    lab = attached
    send(session, lab.models["B"], 1)
    damage(tmp_path / "run")
    with pytest.raises(TransferError):
        inprocess.update(lab.llm)
    lab.now()  # it generates
    send(session, lab.models["A"], 2)
    inprocess.update(lab.llm)
    lab.is_("A")


def test_another_model_is_declined(attached, session):
    lab = attached
    send(session, lab.models["A"], 1)
    inprocess.update(lab.llm)
    other = tiny_model(lab.kind, 3, vocab_size=300, num_attention_heads=8)
    send(session, other, 2)
    with pytest.raises(TableMismatch, match="q_proj"):
        inprocess.update(lab.llm)
    lab.is_("A")
    send(session, lab.models["B"], 3)
    inprocess.update(lab.llm)
    lab.is_("B")


def test_updates_need_a_session(lab):
    for _ in range(2):
        with pytest.raises(HandleError, match="init_weight_transfer_engine"):
            inprocess.update(lab.llm)
    with pytest.raises(ConfigError, match="receiver_id"):
        lab.llm.init_weight_transfer_engine({"init_info": {"session": "file:///tmp/x"}})


def test_every_wrong_field_of_the_calls_is_named(lab, session):
    init = lab.llm.init_weight_transfer_engine
    with pytest.raises(ConfigError, match=r"init_info\.lease_ttl.*init_info\.colour"):
        init({"init_info": {"session": session, "backend": "filesystem", "receiver_id": "r",
                            "lease_ttl": -1, "colour": "red"}})  # fmt: skip
    inprocess.attach(lab.llm, session=session, backend="filesystem", receiver_id="r")
    try:
        lab.llm.start_weight_update()
        with pytest.raises(ConfigError, match=r"update_info\.version.*\n.*held before"):
            lab.llm.update_weights({"update_info": {"version": "7"}})
    finally:
        inprocess.detach(lab.llm)


def test_an_attached_engine_is_taken_over_only_when_asked(attached, session, tmp_path):
    lab = attached
    info = {"session": session, "backend": "filesystem", "receiver_id": "replica-0", "timeout": 20}
    send(session, lab.models["B"], 1)
    inprocess.update(lab.llm)
    lab.llm.init_weight_transfer_engine({"init_info": {**info, "take_over": False}})
    inprocess.update(lab.llm, version=1, timeout=0.5)  # it still knows what it holds
    elsewhere = {**info, "session": f"file://{tmp_path / 'other'}", "take_over": False}
    with pytest.raises(ConfigError, match="attached to session"):
        lab.llm.init_weight_transfer_engine({"init_info": elsewhere})
    send(session, lab.models["A"], 2)
    inprocess.update(lab.llm)
    lab.is_("A")


class InProcessClient:
    """What vLLM's trainers ask of a client, over an ``LLM``."""

    def __init__(self, llm):
        self.llm = llm

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, update_info):
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.llm.finish_weight_update(weight_version)


@pytest.mark.parametrize("inner", ["filesystem", "memory"])
def test_a_trainer_of_vllms_own_api_switches_by_a_name(lab, session, inner):
    transfer = pytest.importorskip("vllm.distributed.weight_transfer")
    if not hasattr(transfer, "WeightTransferTrainerFactory"):
        pytest.skip("this vLLM has no trainer engines")
    from weightwire.sources import ModuleSource
    from weightwire_vllm.sources import to_vllm
    from weightwire_vllm.trainer import TrainerInfo

    info = TrainerInfo(session=session, inner=inner, timeout=30, rank=0)
    source = transfer.ModuleSource(lab.models["B"])
    client = InProcessClient(lab.llm)
    trainer = transfer.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    try:
        trainer.send_weights()
        lab.is_("B")
        assert lab.llm.get_weight_version() == "1"
        assert trainer.report.version == 1
    finally:
        trainer.shutdown()
        inprocess.detach(lab.llm)
    # A stream of full tensors, as any other source of vLLM's is one.
    full = to_vllm(ModuleSource(lab.models["A"]))
    names = [name for name, _ in full]
    assert [meta.name for meta in full.metadata()] == names
    assert not lab.ties.keys() & set(names)
    info = TrainerInfo(session=session, inner=inner, timeout=30, rank=0, first_version=5)
    trainer = transfer.WeightTransferTrainerFactory.trainer_init(info, client=client, source=full)
    try:
        trainer.send_weights()
        lab.is_("A")
        assert lab.llm.get_weight_version() == "5"
        lab.llm.start_weight_update()  # somebody else's: the round fails on both sides, at once
        with pytest.raises(TransferError, match="already"):
            trainer.send_weights()
        lab.is_("A")
        with pytest.raises(HandleError):
            lab.llm.finish_weight_update()
    finally:
        trainer.shutdown()
        inprocess.detach(lab.llm)


def test_a_pool_drives_an_engine_of_this_process(lab, session):
    from weightwire.vllm import Pool, UpdateFailed

    with Pool({"r": lab.llm}, session=session, backend="filesystem", timeout=30) as pool:
        pool.attach()
        send(session, lab.models["B"], 3)
        report = pool.update()
        assert pool.in_service == {"LLM": 3}
        assert report.updated["LLM"].paused_seconds > 0
        lab.is_("B")
        assert lab.llm.get_weight_version() == "3"
        send(session, tiny_model("qwen3", 3, vocab_size=300, num_attention_heads=8), 4)
        with pytest.raises(UpdateFailed, match="q_proj"):
            pool.update(4)
        assert pool.out.keys() == {"LLM"}
        assert pool.replicas["r"].whole
        send(session, lab.models["A"], 5)
        pool.update(5)
        lab.is_("A")
        pool.detach()


def test_a_pool_wakes_an_engine_of_this_process(lab, session):
    from weightwire.vllm import Pool

    with Pool({"r": lab.llm}, session=session, backend="filesystem", timeout=30) as pool:
        pool.attach()
        for version, (which, level) in enumerate((("B", 1), ("A", 2)), 1):
            lab.llm.sleep(level)
            send(session, lab.models[which], version)
            report = pool.update(version)
            assert "wake" in report.updated["LLM"].seconds
            assert not lab.llm.llm_engine.is_sleeping()
            lab.is_(which)
        lab.llm.sleep(2)
        held = lab.llm.collective_rpc(lambda worker: worker.weight_transfer_engine.version)
        assert held == [None]
        pool.update(2)
        lab.is_("A")
        pool.detach()
