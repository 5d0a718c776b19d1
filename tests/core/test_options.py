"""Options and backend configs: every wrong value is named, with what would be right."""

from __future__ import annotations

import math

import pytest
import torch

from weightwire.config import select
from weightwire.contract import BackendConfig
from weightwire.errors import BackendNotFound, ConfigError, UnsupportedOperation
from weightwire.handle import ranks_of, slot_device
from weightwire.memory import MemoryBackend, MemoryConfig
from weightwire.options import ReceiverOptions, SenderOptions, make_options

SENDER = {"rank": 0, "world_size": 1, "group_bytes": 1 << 20}


def refusal(**changed: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make_options(SenderOptions, **{**SENDER, **changed})
    return str(caught.value)


@pytest.mark.parametrize("name", ["timeout", "open_timeout"])
@pytest.mark.parametrize("value", [0, -1.5, math.nan, math.inf, "5", None, True])
def test_timeouts_are_finite_numbers_above_zero(name, value):
    assert refusal(**{name: value}).startswith(f"{name}={value!r}: input should be ")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("group_bytes", 7, "greater than or equal to 8"),
        ("group_bytes", 1e9, "a valid integer"),
        ("lease_ttl", 0.1, "greater than or equal to 0.2"),
        ("lease_ttl", math.nan, "86400"),
        ("verify", "some", "'off', 'sample' or 'full'"),
        ("on_receiver_loss", "ignore", "'fail' or 'continue'"),
        ("resume_from", -1, "greater than or equal to 0"),
        ("resume_from", "3", "a valid integer"),
        ("resume_from", 10**12, "less than 1000000000000"),
        ("min_receivers", -1, "greater than or equal to 0"),
        ("overlap", 1, "a valid boolean"),
        ("keep_dtype", "*.bias", "a valid tuple"),
        ("keep_dtype", None, "a valid tuple"),
        ("rank", -1, "greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(name, value, message):
    said = refusal(**{name: value})
    assert said.startswith(f"{name}={value!r}: input should be ")
    assert message in said


def test_all_wrong_values_are_told_at_once():
    lines = refusal(timeout=0, group_bytes=1).splitlines()
    assert sorted(line.partition("=")[0] for line in lines) == ["group_bytes", "timeout"]


def test_a_token_of_the_wrong_type_is_not_shown():
    said = refusal(token=b"hunter2")
    assert said.startswith("token=...: ")
    assert "hunter2" not in said


def test_whole_numbers_are_fine_where_seconds_are_wanted():
    assert make_options(ReceiverOptions, rank=0, world_size=1, timeout=5).timeout == 5.0


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (None, 0), (2, 2)])
def test_ranks_are_counted_from_zero_below_the_world_size(rank, world_size):
    with pytest.raises(ConfigError, match=r"isn't below world_size .*: count ranks from 0"):
        ranks_of(rank, world_size, None)


def test_ranks_are_numbers_or_a_group_but_not_both():
    with pytest.raises(ConfigError, match=r"group= and rank=/world_size= say the same thing"):
        ranks_of(0, None, object())


# ---------------------------------------------------------------------- choosing a backend


def test_a_backend_is_chosen_by_name_mapping_or_validated_config():
    config = MemoryConfig(max_bytes=5)
    for choice, wanted in [
        ("memory", MemoryConfig()),
        ({"backend": "memory", "max_bytes": 5}, config),
        (("memory", config), config),
        (("memory", {"max_bytes": 5}), config),
    ]:
        backend, chosen = select(choice)
        assert isinstance(backend, MemoryBackend)
        assert chosen == wanted


def test_an_unknown_backend_lists_what_is_installed():
    with pytest.raises(BackendNotFound) as caught:
        select("memroy")
    first = str(caught.value).splitlines()[0]
    assert first.startswith("no backend 'memroy' is installed; installed: ")
    assert "filesystem" in first
    assert "memory" in first


def test_an_option_of_other_backends_is_an_operation_that_this_one_lacks():
    """Whoever tries whether a transport can do it tells that from a misspelt option."""
    with pytest.raises(UnsupportedOperation, match="'memory' has no option 'zero_copy'"):
        select({"backend": "memory", "zero_copy": True})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"backend": "memory", "max_byte": 5},
            "backend 'memory' has no option 'max_byte': its options are directory, max_bytes",
        ),
        (
            {"backend": "memory", "max_bytes": "many"},
            "backend 'memory', option 'max_bytes': Input should be a valid integer",
        ),
        (
            {"backend": "memory", "max_bytes": 0},
            "backend 'memory', option 'max_bytes': Input should be greater than 0",
        ),
        ({"backend": "memory", 3: 4}, "backend 'memory'"),
        ({"max_bytes": 5}, "the backend config has no 'backend' key: write {'backend': 'filesys"),
        ({"backend": 5}, "the backend config has no 'backend' key"),
        (5, "backend 5 is a int: give a name or a mapping with 'backend'"),
        (None, "backend None is a NoneType: give a name or a mapping with 'backend'"),
        (("memory", 5), "the options of backend 'memory' are a int: give a mapping or a MemoryCo"),
        (("memory", "x"), "the options of backend 'memory' are a str: give a mapping or a MemoryC"),
        (("memory", BackendConfig()), "backend 'memory' takes MemoryConfig, not BackendConfig"),
    ],
)
def test_a_wrong_config_names_the_backend_the_option_and_the_remedy(choice, message):
    with pytest.raises(ConfigError) as caught:
        select(choice)
    assert str(caught.value).startswith(message)


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        MemoryConfig().max_bytes = 1


def test_slots_lie_where_the_tensors_do_unless_told_otherwise():
    memory = MemoryBackend()
    assert slot_device(None, torch.device("cpu"), memory) == torch.device("cpu")
    assert slot_device(None, torch.device("meta"), memory) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device='gpu 0' is no device: write 'cpu' or 'cuda:0'"):
        slot_device("gpu 0", torch.device("cpu"), memory)
    with pytest.raises(UnsupportedOperation, match=r"'memory' can't use device 'cuda:1', only cpu"):
        slot_device("cuda:1", torch.device("cpu"), memory)
