"""vLLM's own loaders that break recorders of methods, replayed and compared with themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from weightwire.errors import TraceError

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))

from loaders import rand, same, trace


def loading(loader):
    """A model's load that hands each tensor to one weight loader."""

    def load(p, weights):
        for name, w in weights:
            loader(p[name], w)

    return load


def test_composed_loaders_transform_their_destination():
    from vllm.model_executor.model_loader.weight_utils import (
        composed_weight_loader,
        default_weight_loader,
    )

    loader = composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x.float()))
    tape, program = same(
        loading(loader), {"A": rand(8), "D": rand(8)}, {"A": rand(8), "D": rand(8)}
    )
    assert program.replayed == len(tape.instructions)
    assert {i.func for i in tape.instructions} > {torch.ops.aten.exp.default}


def test_sharded_conv_loader():
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader

    # Full size, extra rows and whether it is replicated, for x, B and C; rank 1 of 2.
    loader = mamba_v2_sharded_weight_loader([(8, 0, False), (4, 0, False), (4, 0, False)], 2, 1)
    _, program = same(loading(loader), {"conv": rand(8, 1, 4)}, {"conv": rand(16, 1, 4)})
    assert sum(region.sizes[0] for region in program.regions) == 8


def test_default_loader_of_scalars():
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    scalar, one = torch.tensor(0.5), rand(1)
    destinations = {"scale": one.clone(), "other": scalar.clone()}
    same(loading(default_weight_loader), destinations, {"scale": scalar, "other": one})


def test_a_copy_outside_any_loader():
    def load(p, weights):
        for _, w in weights:
            part = w.view(4, 2, 6, -1)[1:3].transpose(1, 2).contiguous()
            p["experts"].copy_(part)

    same(load, {"experts": rand(2, 6, 2, 5)}, {"w": rand(4, 12, 5)})


def test_a_loader_that_looks_at_values_is_named():
    def looks(param, loaded_weight):
        if loaded_weight.max() > 0:
            param.copy_(loaded_weight)

    with pytest.raises(TraceError, match=r"looks .*reads values") as caught:
        trace(loading(looks), {"model.w": rand(4)}, {"model.w": rand(4)})
    assert str(caught.value).startswith("parameter 'model.w': tensor 'model.w'")


def test_the_models_own_mapper_decides_names():
    """Multimodal wrappers: prefixes that a checkpoint has and the model lacks, and the reverse."""
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "mtp.": None,
        }
    )

    def load(p, weights):
        model = torch.nn.Module()
        for key, tensor in p.items():
            *path, leaf = key.split(".")
            holder = model
            for name in path:
                if name not in holder._modules:
                    holder.add_module(name, torch.nn.Module())
                holder = holder._modules[name]
            holder.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
        AutoWeightsLoader(model).load_weights(weights, mapper=mapper)

    destinations = {
        "visual.proj.weight": rand(3, 4),
        "language_model.model.embed.weight": rand(5, 4),
        "language_model.lm_head.weight": rand(5, 4),
    }
    weights = {
        "model.visual.proj.weight": rand(3, 4),
        "model.language_model.embed.weight": rand(5, 4),
        "lm_head.weight": rand(5, 4),
        "mtp.weight": rand(2),
    }
    tape, program = same(load, destinations, weights)
    assert tape.writers["language_model.lm_head.weight"] == {"lm_head.weight"}
    assert not tape.used["mtp.weight"]
    assert len(program.regions) == 3
