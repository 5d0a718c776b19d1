"""Real engines, built once a file and shared: one at a time fits a small machine."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightwire.cuts import Cuts
from weightwire.grouping import layer_key
from weightwire.sources import WireRules, as_source, resolve
from weightwire.table import Group, Region, Shard, TensorEntry, TensorTable, dtype_name
from weightwire.tables import build_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server_rig import Cold, Fleet, Server

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm" in item.path.parent.name:
            item.add_marker(pytest.mark.vllm)
            # Other people's deprecations: transformers, vLLM and torch warn on import.
            item.add_marker(pytest.mark.filterwarnings("default"))


fleet_key = pytest.StashKey["Fleet"]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Servers end with the last of the files whose tests share them."""
    fleet = item.session.stash.get(fleet_key, None)
    if fleet is None:
        return
    users = {other.path for other in item.session.items if "servers" in fixtures_of(other)}
    if nextitem is None or nextitem.path not in users:
        fleet.down()


def fixtures_of(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    from server_rig import Fleet

    made = Fleet(tmp_path_factory.mktemp("servers"))
    request.session.stash[fleet_key] = made
    yield made
    made.close()


@pytest.fixture
def servers(fleet: Fleet) -> Iterator[dict[str, Server]]:
    """Two servers in good order, whatever the test before did to them."""
    try:
        yield fleet.up()
    finally:
        fleet.settle()


@pytest.fixture
def cold(servers: dict[str, Server], fleet: Fleet) -> dict[str, Cold]:
    return fleet.cold


@pytest.fixture
def session(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'run'}"


PROMPTS = [[5, 6, 7, 9], list(range(2, 30))]


@dataclass(frozen=True)
class Payload:
    table: TensorTable
    tensors: dict[str, torch.Tensor]

    def box(self, region: Region) -> torch.Tensor:
        """A region's bytes, as they arrive."""
        whole = self.tensors[self.table.tensors[region.tensor].name].detach()
        box = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
        return whole[box].clone(memory_format=torch.contiguous_format)


def payload(state: dict[str, torch.Tensor], ties: dict[str, str] | None = None) -> Payload:
    """A table of whole tensors, one group a layer."""
    ties = ties or {}
    tensors = {name: tensor for name, tensor in state.items() if name not in ties}
    groups: dict[Any, list[int]] = {}
    entries = []
    for i, (name, tensor) in enumerate(tensors.items()):
        shape = tuple(tensor.shape)
        shards = (Shard(0, (0,) * len(shape), shape),)
        entries.append(TensorEntry(name, shape, dtype_name(tensor.dtype), shards))
        groups.setdefault(layer_key(name) or name, []).append(i)
    table = TensorTable(
        1, tuple(entries), tuple(Group(tuple(group)) for group in groups.values()), ties
    )
    table.validate()
    return Payload(table, tensors)


class Interrupted(Exception):
    """Raised by ``sync`` where a test asks for it."""


def sync(
    target: Any, sent: Payload, *, stop_before: int | None = None, poison: bool = False
) -> bool | None:
    """Drive a target as the receiver does; returns what rollback said, None on success.

    ``poison`` overwrites each buffer as early as the contract allows.
    """
    regions = target.plan(sent.table)
    target.begin(1)
    handed = []
    try:
        cuts = Cuts(sent.table)
        for index in range(len(sent.table.groups)):
            if index == stop_before:
                raise Interrupted
            buffers = {
                region: sent.box(region) for region in regions if cuts.group_of(region) == index
            }
            if buffers:
                target.write(index, buffers)
            handed.extend(buffers.values())
            if poison and not target.keeps_buffers:
                for buffer in buffers.values():
                    buffer.view(torch.uint8).fill_(0xFF)
        if stop_before == len(sent.table.groups):
            raise Interrupted
        target.commit()
        if poison:
            for buffer in handed:
                buffer.view(torch.uint8).fill_(0xFF)
    except Interrupted as error:
        return target.rollback(error)
    return None


@dataclass
class Cold:
    """What a fresh engine on a checkpoint looks like."""

    snapshot: Any
    outputs: Any
    logprobs: Any


@dataclass
class Lab:
    """One running engine (started on A), and what cold A and cold B are."""

    kind: str
    llm: Any
    target: Any
    models: dict[str, Any]
    cold: dict[str, Cold]
    packed: bool

    def of(self, which: str) -> Payload:
        """A version as a trainer publishes it: its own tensors, and views of them."""
        resolved = resolve(as_source(self.models[which]), WireRules())
        # So small that each layer is a group of its own.
        table = build_table([resolved.spec], 1 << 14, views=resolved.views)
        return Payload(table, dict(resolved.tensors))

    @property
    def ties(self) -> dict[str, str]:
        """Aliases of the model, to the names under which it is saved."""
        state = self.models["A"].state_dict(keep_vars=True)
        ends = ("embed_tokens.weight", "embeddings.weight", "wte.weight")
        embedding = next(name for name in state if name.endswith(ends))
        tied = state.get("lm_head.weight") is state[embedding]
        return {"lm_head.weight": embedding} if tied else {}

    def sync(self, sent: Payload, **options: Any) -> bool | None:
        return sync(self.target, sent, **options)

    def now(self) -> Cold:
        return observe(self.llm, packed=self.packed)

    def is_(self, which: str) -> None:
        from weightwire_vllm.compare import compare

        seen, expected = self.now(), self.cold[which]
        assert seen.outputs == expected.outputs
        assert seen.logprobs == expected.logprobs
        if not self.packed:
            difference = compare(seen.snapshot, expected.snapshot)
            assert difference.equal, difference
            assert difference.compared_bytes > 150_000


def observe(llm: Any, *, packed: bool) -> Cold:
    from vllm import SamplingParams
    from weightwire_vllm.compare import snapshot
    from weightwire_vllm.inprocess import on_model, token_logprobs

    llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return Cold(
        None if packed else on_model(llm, snapshot),
        [list(output.outputs[0].token_ids) for output in outputs],
        token_logprobs(llm, PROMPTS),
    )


@pytest.fixture
def engine_room() -> Iterator[dict[str, str]]:
    """Environment of an engine with several workers; what they leave is gone at the end.

    vLLM's CPU workers hang as their processes exit, are killed by the executor after its
    5 seconds of grace, and so leave the shared memory of their group, which has the name
    of the file in which they met.  That file may be gone by then.
    """
    over, names = threading.Event(), set[str]()

    def look(directory: Path) -> None:
        while not over.wait(0.1):
            names.update(meeting.name for meeting in directory.glob("vllm_dist_*"))

    with tempfile.TemporaryDirectory(prefix="ww-") as directory:
        looking = threading.Thread(target=look, args=(Path(directory),))
        looking.start()
        try:
            yield room(directory)
        finally:
            over.set()
            looking.join()
            for name in names:
                for left in Path("/dev/shm").glob(f"{name}-*"):
                    left.unlink()


def room(directory: str) -> dict[str, str]:
    """Environment of an engine's processes that meet in a directory."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),  # workers import what runs in them
        "TMPDIR": directory,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Lab]]:
    from kinds import SEEDS, make

    from weightwire_vllm.compare import comparable_engines
    from weightwire_vllm.inprocess import build_engine, on_model, stop_engine, vllm_config
    from weightwire_vllm.models import save_checkpoint
    from weightwire_vllm.target import VllmTarget

    current: dict[tuple[str, bool], Lab] = {}

    def stop() -> None:
        for lab in current.values():
            stop_engine(lab.llm)
        current.clear()
        gc.collect()

    def get(kind: str, packed: bool = False) -> Lab:
        if (kind, packed) in current:
            return current[kind, packed]
        stop()
        mode.close()
        if not packed:
            mode.enter_context(comparable_engines())
        name, _, quantization = kind.partition("@")
        options = {"quantization": quantization} if quantization else {}
        models = {which: make(name, seed) for which, seed in SEEDS.items()}
        root = tmp_path_factory.mktemp(kind)
        paths = {name: save_checkpoint(model, root / name) for name, model in models.items()}
        cold = {}
        llm = None
        for which in ("B", "A"):
            if llm is not None:
                stop_engine(llm)
            llm = build_engine(paths[which], dtype="bfloat16", **options)
            cold[which] = observe(llm, packed=packed)
        target = VllmTarget(on_model(llm, lambda model: model), vllm_config(llm))
        current[kind, packed] = Lab(kind, llm, target, models, cold, packed)
        return current[kind, packed]

    with contextlib.ExitStack() as mode:
        yield get
        stop()


@pytest.fixture(params=("qwen3", "qwen3-tied", "qwen3_moe"), scope="module")
def lab(request: pytest.FixtureRequest, labs: Callable[[str], Lab]) -> Lab:
    """One kind after the other; pytest puts a module's tests of a kind together."""
    return labs(request.param)


@pytest.fixture(scope="session")
def payloads() -> Callable[..., Payload]:
    return payload
