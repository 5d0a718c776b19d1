"""``weightwire plan`` for vLLM: its own loader traced on a model without weights."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from weightwire.conversion import ModuleViews
from weightwire.errors import BackendUnavailable, ConfigError, TableMismatch
from weightwire.planning import PlanRequest, RankPlan, rank_plan, trainer_table
from weightwire.routes import Served
from weightwire.table import DTYPES
from weightwire.trace import LazyWeight, compile_tape
from weightwire_vllm import compat
from weightwire_vllm.dryrun import LoadTrace, trace_load
from weightwire_vllm.verdict import check_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from weightwire.table import TensorTable

__all__ = ["model_table", "plan_ranks"]


def plan_ranks(request: PlanRequest) -> Iterator[RankPlan]:
    """Plan each rank as a running engine of that topology plans it.

    Raises:
        BackendUnavailable: vLLM or transformers isn't installed.
        ConfigError: the directory, the architecture or the topology can't be used.
    """
    if compat.vllm_version() is None:
        raise BackendUnavailable(
            "weightwire plan traces vLLM's own loader, and vLLM isn't installed: install vllm"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not (request.model / "config.json").is_file():
        raise ConfigError(
            f"{request.model} has no config.json: give a Hugging Face model's directory"
        )
    inference = request.inference
    try:
        config = compat.planning_config(
            request.model,
            tp=inference.tp,
            pp=inference.pp,
            dp=inference.dp,
            expert_parallel=inference.is_expert_parallel,
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"vLLM can't run {request.model} so: {_brief(error)}") from error
    table = model_table(request, compat.column_slices(config))
    served = Served(table)
    for rank in request.ranks:
        yield _plan_rank(rank, config, table, served)


def _plan_rank(rank: int, config: Any, table: TensorTable, served: Served) -> RankPlan:
    try:
        with compat.model_of_rank(config, rank) as model:
            trace, unmatched = _traced(model, config, table)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"vLLM can't build rank {rank}: {_brief(error)}") from error
    program = compile_tape(trace.tape, table)
    replayed = {group: len(batch) for group, batch in program.batches.items()}
    return rank_plan(rank, served, program.regions, replayed, unmatched)


def _traced(model: nn.Module, config: Any, table: TensorTable) -> tuple[LoadTrace, list[str]]:
    ranks = int(config.parallel_config.world_size_across_dp)
    try:
        return check_table(model, config, table, None, ranks=ranks), []
    except TableMismatch:
        offered = [LazyWeight(t.name, t.shape, t.dtype) for t in table.checkpoint()]
        trace = trace_load(model, config, offered)  # raises where the loader itself refuses
    unused = [weight.name for weight in offered if not trace.tape.used.get(weight.name)]
    unfilled = [
        key
        for key in trace.tape.loadable
        if key not in trace.buffers
        and (key not in trace.tape.written or not trace.tape.written[key].complete)
    ]
    return trace, (unused if ranks == 1 else []) + unfilled


def model_table(request: PlanRequest, column_slices: int) -> TensorTable:
    """The table that a transformers trainer of the request's topology would publish.

    Args:
        column_slices: of the engine that reads it.

    Raises:
        ConfigError: transformers doesn't know the architecture.
    """
    model = _trainer_model(request)
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    given: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in state.items():
        given[name] = (tuple(tensor.shape), tensor.dtype)
        if id(tensor) in names:
            ties[name] = names[id(tensor)]
        names.setdefault(id(tensor), name)
    views = ModuleViews(model).of(given)
    return trainer_table(
        {name: value for name, value in given.items() if name not in ties},
        ties,
        views,
        request.trainer,
        request.group_bytes,
        is_expert=lambda name: ".experts." in name,
        column_slices=column_slices,
    )


def _trainer_model(request: PlanRequest) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            "weightwire plan needs transformers to know the trainer's tensors: "
            "install weightwire[vllm]"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = transformers.AutoConfig.from_pretrained(request.model)
        dtype = DTYPES[request.wire_dtype] if request.wire_dtype else config.dtype
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.bfloat16
            )
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise ConfigError(
            f"transformers can't make the model of {request.model}: {_brief(error)}"
        ) from error
    return model


def _brief(error: Exception) -> str:
    said = str(error)
    if isinstance(error, ValidationError):  # without pydantic's account of the input
        said = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    text = " ".join(said.split())
    return text if len(text) < 500 else text[:500] + " ..."
