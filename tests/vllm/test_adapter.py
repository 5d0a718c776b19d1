"""An adapter that an engine serves, replaced in memory: as if it had been loaded from disk."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from lora_policy import step, trainer

import weightwire
from weightwire.errors import ConfigError, UnsupportedOperation
from weightwire.vllm import Pool, UpdateFailed
from weightwire_vllm.models import save_checkpoint, tiny_model
from weightwire_vllm.plugin import register

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra 'examples'")

PROMPTS = [[5, 6, 7, 9], [11, 12, 13]]


@pytest.fixture(scope="module")
def model():
    return trainer(tiny_model("qwen3", 1))


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    """One that serves the trainer's first adapter under id 1."""
    from vllm import LLM

    register()
    root = tmp_path_factory.mktemp("engine")
    checkpoint = save_checkpoint(tiny_model("qwen3", 1), root / "base")
    model.save_pretrained(root / "first")
    made = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        weight_transfer_config={"backend": "weightwire"},
    )
    yield made, root
    made.llm_engine.engine_core.shutdown()


def request(path):
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, str(path))


def said(engine, path):
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    outputs = engine.generate(
        [{"prompt_token_ids": tokens} for tokens in PROMPTS],
        SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True),
        use_tqdm=False,
        lora_request=None if path is None else request(path),
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def held(engine):
    """The bytes that the kernels read for the adapter."""
    from weightwire_vllm.inprocess import on_model

    def look(model):
        manager = model.lora_manager
        slot = manager.lora_index_to_id.index(1)
        return {
            f"{name} {matrix} {i}": stacked[slot].contiguous().view(torch.uint8).clone()
            for name, module in manager.modules.items()
            for matrix in ("lora_a_stacked", "lora_b_stacked")
            for i, stacked in enumerate(getattr(module, matrix))
        }

    return on_model(engine, look)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_synced_adapter_equals_one_that_is_loaded_from_disk(llm, model, tmp_path):
    engine, root = llm
    session = f"file://{tmp_path}/run"
    base, first = said(engine, None), said(engine, root / "first")
    assert base != first
    before = held(engine)
    config = model.peft_config["default"].to_dict()
    with (
        Pool(
            {"r": engine},
            session=session,
            backend="filesystem",
            timeout=30,
            target="adapter",
            adapter={"id": 1, "config": config},
        ) as pool,
        weightwire.open_sender(
            "filesystem", session=session, source=weightwire.LoraAdapter(model)
        ) as sender,
    ):
        pool.attach()
        for version in (1, 2):
            step(model)
            report = sender.send(version)
            assert report.nbytes < 64 << 10  # of a model of 330 KiB
            pool.update(version)
            # The path is that of the first one, and isn't read any more.
            now, there = said(engine, root / "first"), held(engine)
            assert not equal(there, before)
            model.save_pretrained(root / f"version-{version}")
            engine.llm_engine.remove_lora(1)
            assert said(engine, root / f"version-{version}") == now
            assert equal(held(engine), there)
            before = there
            assert said(engine, None) == base
        pool.detach()


def test_what_does_not_fit_changes_nothing(llm, model, tmp_path):
    engine, root = llm
    session = f"file://{tmp_path}/run"
    said(engine, root / "first")
    before = held(engine)
    config = model.peft_config["default"].to_dict()

    def attach(**adapter):
        info = {"session": session, "backend": "filesystem", "receiver_id": "r", "timeout": 20}
        init = {**info, "target": "adapter", "adapter": {"id": 1, "config": config, **adapter}}
        engine.init_weight_transfer_engine({"init_info": init})

    with pytest.raises(ConfigError, match="no adapter with id 7"):
        attach(id=7)
    with pytest.raises(ConfigError, match=r"init_info\.adapter\.id"):
        attach(id=0)
    options = {"session": session, "backend": "filesystem", "timeout": 20}
    adapter = {"id": 1, "config": config}
    others = [trainer(tiny_model("qwen3", 1), r=2), trainer(tiny_model("qwen3", 1))]
    del others[1].base_model.model.model.layers[1].mlp.up_proj.lora_A["default"]
    del others[1].base_model.model.model.layers[1].mlp.up_proj.lora_B["default"]
    words = [
        r"down_proj' A: \(2, 96\) is sent, \(4, 96\) is served",
        r"layers.1.mlp.up_proj.*nothing is sent",
    ]

    def is_whole_when_refused(version, source, adapter, word):
        with (
            Pool({"r": engine}, **options, target="adapter", adapter=adapter) as pool,
            weightwire.open_sender(
                "filesystem", session=session, source=weightwire.LoraAdapter(source)
            ) as sender,
        ):
            pool.attach()
            sender.send(version)
            with pytest.raises(UpdateFailed, match=word):
                pool.update(version)
            pool.detach()
            return pool.replicas["r"].whole

    for version, (other, word) in enumerate(zip(others, words, strict=True), 1):
        assert is_whole_when_refused(version, other, adapter, word)
    is_whole_when_refused(3, model, {"id": 1, "config": {**config, "use_dora": True}}, "DoRA")
    with pytest.raises(ConfigError, match="go together"):
        Pool({"r": engine}, **options, target="adapter")
    assert equal(held(engine), before)


def test_an_engine_without_adapters_refuses():
    from weightwire_vllm.adapter import AdapterTarget
    from weightwire_vllm.info import AdapterInfo

    with pytest.raises(UnsupportedOperation, match="enable_lora=True"):
        AdapterTarget(torch.nn.Linear(2, 2), None, AdapterInfo(id=1, config={}))
