"""Topologies as people write them: ``fsdp=8,ep=4`` and ``tp=2``, and which ranks to plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightwire.errors import ConfigError

__all__ = ["Inference", "Trainer", "parse_inference", "parse_ranks", "parse_trainer"]

_MAX_WORLD = 1 << 16


@dataclass(frozen=True)
class Trainer:
    """How a trainer's ranks hold the model.

    Attributes:
        replicas: copies of the whole (``dp``), as HSDP has them.
        fsdp: ranks over which each tensor of a copy is sharded, along dimension 0.
        ep: of these, ranks over which experts are spread; the rest of ``fsdp`` shards
            each expert along dimension 1.
    """

    replicas: int = 1
    fsdp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.replicas * self.fsdp


@dataclass(frozen=True)
class Inference:
    """How one replica of the engine is spread.

    Attributes:
        tp: tensor parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks, as engines with expert parallelism have them.
        is_expert_parallel: whether experts are spread over all ``tp`` times ``dp`` ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    is_expert_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


def parse_trainer(text: str) -> Trainer:
    """``dp``, ``fsdp``, ``ep``.

    Raises:
        ConfigError: an axis is unknown, or the sizes can't be.
    """
    axes = _axes(text, "--trainer", ("dp", "fsdp", "ep"))
    trainer = Trainer(axes.get("dp", 1), axes.get("fsdp", 1), axes.get("ep", 1))
    if trainer.fsdp % trainer.ep:
        raise ConfigError(
            f"--trainer {text}: ep={trainer.ep} doesn't divide fsdp={trainer.fsdp}: experts are "
            "spread over a part of the ranks that shard a copy, so make fsdp a multiple of ep"
        )
    _check_world("--trainer", text, trainer.world_size)
    return trainer


def parse_inference(text: str) -> Inference:
    """``tp``, ``pp``, ``dp``, ``ep``.

    Raises:
        ConfigError: an axis is unknown, or the sizes can't be.
    """
    axes = _axes(text, "--inference", ("tp", "pp", "dp", "ep"))
    tp, pp, dp, ep = (axes.get(axis, 1) for axis in ("tp", "pp", "dp", "ep"))
    if "ep" in axes and "dp" not in axes and ep % tp == 0:
        dp = ep // tp
    if ep > 1 and ep != tp * dp:
        raise ConfigError(
            f"--inference {text}: ep={ep} isn't tp x dp = {tp * dp}: the engine spreads experts "
            f"over all of them, so write ep={tp * dp}, or change tp or dp"
        )
    inference = Inference(tp, pp, dp, ep > 1)
    _check_world("--inference", text, inference.world_size)
    return inference


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """``all``, or ranks such as ``3`` and ``0,5``.

    Raises:
        ConfigError: malformed or out of range.
    """
    if text == "all":
        return tuple(range(world_size))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise ConfigError(f"--ranks {text}: give `all`, or ranks such as 0 or 0,3")
    ranks = tuple(dict.fromkeys(map(int, parts)))
    for rank in ranks:
        if rank >= world_size:
            raise ConfigError(
                f"--ranks {text}: rank {rank} is out of range: --inference has {world_size} "
                f"ranks, 0 to {world_size - 1}"
            )
    return ranks


def _axes(text: str, option: str, known: Sequence[str]) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in known:
            raise ConfigError(
                f"{option} {text}: unknown axis {axis!r}: it takes {', '.join(known)}"
            )
        if axis in axes:
            raise ConfigError(f"{option} {text}: {axis} is given twice: leave one out")
        if not size.isdecimal() or not 1 <= int(size[:9]) <= _MAX_WORLD:
            raise ConfigError(
                f"{option} {text}: {axis}={size or '?'} isn't a number of ranks: write, for "
                f"example, {axis}=2"
            )
        axes[axis] = int(size)
    return axes


def _check_world(option: str, text: str, world_size: int) -> None:
    if world_size > _MAX_WORLD:
        raise ConfigError(f"{option} {text}: {world_size} ranks are more than {_MAX_WORLD}")
