from __future__ import annotations

import json
from pathlib import Path

import filesystem_rig as rig
import msgspec
import pytest
import torch
from safetensors import safe_open

from weightwire.errors import TableMismatch, TransferError, UnsupportedOperation
from weightwire.table import Group, Shard, TensorEntry, TensorTable


def load(directory: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads from a version."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(directory / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 -- not a mapping
                assert index["weight_map"][name] == file
                loaded[name] = opened.get_tensor(name)
    return loaded


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_kind_of_tensor_arrives_bit_for_bit(open_sender, open_receiver, versions, threads):
    tensors = rig.everything()
    table = rig.make_table(tensors, per_group=5)
    offer = rig.send(open_sender(table, threads=threads), table, tensors, 3)
    receiver = open_receiver(table, threads=threads)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, rig.whole(table))
    receiver.finish()
    for i, (name, tensor) in enumerate(tensors.items()):
        assert rig.same_bits(got[i], tensor), name
    loaded = load(versions / "v00000003-i1-a1")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert rig.same_bits(loaded[name], tensor), name


def test_seals_come_back_to_whoever_reads_their_tensors(open_sender, open_receiver):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    offer = rig.send(open_sender(table), table, tensors, 1)
    receiver = open_receiver(table)
    receiver.begin(offer)
    for number, group in enumerate(table.groups):
        targets = {i: torch.empty_like(list(tensors.values())[i]) for i in group.tensors}
        seals = receiver.fetch(number, targets)
        assert list(seals) == [rig.seal_of(number, targets)]


def test_another_process_reads_a_version(open_sender, versions, in_child):
    tensors = rig.weights(seed=4)
    table = rig.make_table(tensors)
    offer = rig.send(open_sender(table), table, tensors, 1)
    said = in_child(
        do="receive", directory=str(versions), seed=4, offer=msgspec.json.encode(offer).decode()
    )
    assert said["good"] is True


def test_deferred_puts_give_the_same_version(open_sender, open_receiver):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    offer = rig.send(sender, table, tensors, 1)
    receiver = open_receiver(table)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, rig.whole(table))
    assert all(rig.same_bits(got[i], t) for i, t in enumerate(tensors.values()))


def test_settled_tensors_may_change(open_sender, open_receiver):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    offer = rig.offer_of(table, 1, [sender])
    sender.begin(offer, {})
    for number, group in enumerate(table.groups):
        part = {i: tensors[table.tensors[i].name].clone() for i in group.tensors}
        sender.put(number, part, rig.seal_of(number, part))
        sender.settle()
        for tensor in part.values():
            tensor.zero_()
    sender.finish()
    sender.publish()
    receiver = open_receiver(table)
    receiver.begin(offer)
    got = rig.fetch_all(receiver, table, rig.whole(table))
    assert all(rig.same_bits(got[i], t) for i, t in enumerate(tensors.values()))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_a_version(open_sender, versions, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    given = tmp_path / "given"
    model.save_pretrained(given)
    tensors = {k: v.detach() for k, v in model.state_dict().items()}
    ties = {}
    if tied:
        del tensors["lm_head.weight"]
        ties = {"lm_head.weight": "model.embed_tokens.weight"}
    table = rig.make_table(tensors, ties=ties)
    rig.send(open_sender(table, checkpoint_files=given), table, tensors, 1)
    version = versions / "v00000001-i1-a1"
    assert (version / "config.json").read_bytes() == (given / "config.json").read_bytes()
    assert len(list(version.glob("*.safetensors"))) == 4
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        version, dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected, actual = model.state_dict(), loaded.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert rig.same_bits(actual[name], tensor), name
    manifest = json.loads((version / "weightwire.json").read_text())
    assert manifest["ties"] == ties


@pytest.mark.vllm
def test_vllm_finds_and_reads_the_shards_of_a_version(open_sender, versions):
    utils = pytest.importorskip("vllm.model_executor.model_loader.weight_utils")
    tensors = rig.weights()
    table = rig.make_table(tensors)
    rig.send(open_sender(table), table, tensors, 1)
    folder = versions / "v00000001-i1-a1"
    found = [str(path) for path in folder.glob("*.safetensors")]
    kept = utils.filter_duplicate_safetensors_files(
        found, str(folder), "model.safetensors.index.json"
    )
    loaded = dict(utils.safetensors_weights_iterator(kept, use_tqdm_on_load=False))
    assert loaded.keys() == tensors.keys()
    assert all(rig.same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_data_is_page_aligned_and_wide_dtypes_come_first(open_sender, versions):
    tensors = rig.everything()
    table = rig.make_table(tensors)
    rig.send(open_sender(table, files_per_rank=1), table, tensors, 1)
    raw = (versions / "v00000001-i1-a1" / "model-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 4096 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_a_tensor_in_two_shards_is_refused_by_name(open_sender):
    shards = (Shard(0, (0, 0), (2, 4)), Shard(1, (2, 0), (2, 4)))
    entry = TensorEntry("model.cut.weight", (4, 4), "float32", shards)
    table = TensorTable(2, (entry,), (Group((0,)),))
    with pytest.raises(UnsupportedOperation, match=r"model\.cut\.weight"):
        open_sender(table, world_size=2)


def test_an_empty_second_shard_is_no_second_writer(open_sender):
    shards = (Shard(0, (0, 0), (4, 4)), Shard(1, (4, 0), (0, 4)))
    table = TensorTable(2, (TensorEntry("a", (4, 4), "float32", shards),), (Group((0,)),))
    open_sender(table, world_size=2)


def test_the_name_that_safetensors_reserves_is_refused(open_sender):
    table = rig.make_table({"__metadata__": torch.zeros(1)})
    with pytest.raises(TableMismatch, match="__metadata__"):
        open_sender(table)


def test_what_is_not_contiguous_or_has_another_size_is_refused(open_sender):
    tensors = rig.weights()
    table = rig.make_table(tensors)
    sender = open_sender(table)
    sender.begin(rig.offer_of(table, 1, [sender]), {})
    wide = torch.zeros(300, 8192, dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(UnsupportedOperation, match=r"model\.embed\.weight"):
        sender.put(0, {0: wide}, rig.seal_of(0, {0: wide}))
    short = torch.zeros(4)
    with pytest.raises(TransferError, match=r"model\.embed\.weight"):
        sender.put(0, {0: short}, rig.seal_of(0, {0: short}))


def test_no_tensors_at_all_is_a_version_too(open_sender, open_receiver):
    table = rig.make_table({})
    offer = rig.send(open_sender(table), table, {}, 1)
    receiver = open_receiver(table)
    receiver.begin(offer)
    receiver.finish()
