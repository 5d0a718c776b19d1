from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightwire.errors import ConfigError
from weightwire.names import WRAPPERS, checkpoint_names, strip_wrappers
from weightwire.sources import ModuleSource

part = st.text("abcxyz0123_", min_size=1, max_size=6).filter(lambda text: text not in WRAPPERS)


@given(st.lists(part, min_size=1, max_size=6), st.data())
def test_wrappers_are_stripped_at_any_depth_and_in_any_nesting(parts, data):
    wrapped = []
    for piece in parts:
        wrapped += data.draw(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3))
        wrapped.append(piece)
    assert strip_wrappers(".".join(wrapped)) == ".".join(parts)


@pytest.mark.parametrize("name", ["module_list.w", "_orig_model.w", "my_module.w", "modules.w"])
def test_names_that_only_look_like_wrappers_stay(name):
    assert strip_wrappers(name) == name


def test_two_names_that_collide_without_wrappers_are_an_error_naming_both():
    with pytest.raises(ConfigError) as caught:
        checkpoint_names(["a.w", "_orig_mod.a.w"])
    assert str(caught.value) == (
        "tensors 'a.w' and '_orig_mod.a.w' are both 'a.w' without their wrappers: rename one"
    )


def test_a_compiled_and_wrapped_module_sends_the_plain_modules_names():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = list(ModuleSource(plain).tensors())
    wrapped = nn.Module()
    wrapped.module = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    assert any("_orig_mod" in name for name in wrapped.state_dict())
    assert list(ModuleSource(wrapped).tensors()) == names
