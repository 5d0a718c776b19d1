"""LoRA trainers, with the real PEFT: merged models, and adapters alone."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest
import torch

import weightwire
from weightwire.errors import ConfigError, UnsupportedOperation

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra 'examples'"),
    pytest.mark.filterwarnings("default"),  # other people's deprecations
]


class Net(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16, dtype=dtype)
        self.up = torch.nn.Linear(16, 24, dtype=dtype)
        self.down = torch.nn.Linear(24, 16, bias=False, dtype=dtype)
        self.head = torch.nn.Linear(16, 11, bias=False, dtype=dtype)


def trainer(dtype=torch.float32, **options):
    import peft

    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["up", "down"], **options)
    model = peft.get_peft_model(Net(dtype), config, autocast_adapter_dtype=False)
    step(model)
    return model


def step(model):
    """Adapters as training leaves them: B isn't zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def sync(session, source, target, version, **options):
    with (
        weightwire.open_sender("memory", session=session, source=source, **options) as sender,
        weightwire.open_receiver(
            "memory", session=session, target=target, receiver_id="r"
        ) as receiver,
    ):
        receiving = threading.Thread(target=receiver.receive, args=(30,))
        receiving.start()
        sender.send(version, timeout=30)
        receiving.join()
        assert receiver.version == version


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_model_has_the_bits_that_peft_gives_it(tmp_path, dtype):
    model = trainer(dtype, modules_to_save=["head"])
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    target = Net(dtype)
    sync(f"file://{tmp_path}/s", weightwire.MergedLora(model), target, 1)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    merged = model.merge_and_unload()
    expected = merged.state_dict()
    assert expected.keys() == target.state_dict().keys()
    for name, value in target.state_dict().items():
        assert torch.equal(bits(value), bits(expected[name])), name


def test_the_source_follows_training_merging_and_casts(tmp_path):
    model = trainer()
    source, target = weightwire.MergedLora(model), Net(torch.bfloat16)
    for version in (1, 2):
        step(model)
        sync(f"file://{tmp_path}/{version}", source, target, version, wire_dtype="bfloat16")
        model.merge_adapter()  # as TRL does; the next send finds it so, and adds nothing twice
        for name in ("up", "down"):
            merged = getattr(model.base_model.model, name).base_layer.weight
            got = getattr(target, name).weight
            assert torch.equal(bits(got), bits(merged.to(torch.bfloat16)))
        again = Net(torch.bfloat16)
        sync(f"file://{tmp_path}/{version}-merged", source, again, 1, wire_dtype="bfloat16")
        assert torch.equal(bits(again.up.weight), bits(target.up.weight))
        model.unmerge_adapter()


@pytest.mark.parametrize("adapted", ["head", "embed"])
def test_what_is_tied_to_a_layer_with_an_adapter_stays_the_base_weight(tmp_path, adapted):
    """PEFT adds to one use of a tied weight, not to the other."""
    import peft

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = {
                "embed": torch.nn.Linear(16, 11, bias=False),
                "head": torch.nn.Linear(16, 11, bias=False),
            }
            for name, layer in layers.items():
                self.add_module(name, layer)

    model = Tied()
    model.head.weight = model.embed.weight
    base = model.head.weight.detach().clone()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[adapted]))
    step(model)
    target = Tied()
    sync(f"file://{tmp_path}/s", weightwire.MergedLora(model), target, 1, verify="full")
    other = "embed" if adapted == "head" else "head"
    assert torch.equal(getattr(target, other).weight, base)
    layer = getattr(model.base_model.model, adapted)
    merged = base + layer.get_delta_weight("default")
    assert torch.equal(getattr(target, adapted).weight, merged)


def test_an_adapter_alone_has_the_names_of_its_checkpoint(tmp_path):
    model = trainer()
    model.save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    target = {name: torch.zeros_like(value) for name, value in saved.items()}
    sync(f"file://{tmp_path}/s", weightwire.LoraAdapter(model), target, 1)
    for name, value in target.items():
        assert torch.equal(bits(value), bits(saved[name])), name


def test_what_is_no_plain_lora_is_refused_by_name():
    with pytest.raises(ConfigError, match="no LoRA layers"):
        weightwire.MergedLora(Net(torch.float32))
    with pytest.raises(ConfigError, match="no layer has an adapter 'other'"):
        weightwire.LoraAdapter(trainer(), "other")
    with pytest.raises(UnsupportedOperation, match=r"up.*DoRA"):
        weightwire.MergedLora(trainer(use_dora=True))
    import peft

    config = peft.LoraConfig(r=4, target_modules=["embed", "up"])
    model = peft.get_peft_model(Net(torch.float32), config)
    with pytest.raises(UnsupportedOperation, match=r"embed.*isn't of a linear layer"):
        weightwire.MergedLora(model)
