"""Checkpoint views: checkpoint tensors as chains of operations on the trainer's own.

Engines load checkpoint (Hugging Face) names.  Where a trainer keeps its weights
otherwise in memory (experts fused, gate and up stacked), it runs its own
conversion once, on tensors without data; what that did to each tensor is recorded
and travels in the table.  The trainer's tensors stay where they are, and a receiver
reads just the bytes of the checkpoint tensors that it wants.

Chains hold operations on indices alone: selecting, slicing, permuting, reshaping,
and joining.  They say nothing of memory layout, so that copies which a conversion
makes (``contiguous``) vanish.  Chains that came from another process are checked
by ``shape_of`` before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightwire.errors import TableMismatch, TraceError

__all__ = ["Operand", "Step", "View", "apply_view", "record_views", "shape_of"]

_MAX_DIMS = 16
_MAX_NAME = 1024
_MAX_INDEX = 1 << 56

Index = Annotated[int, Meta(ge=0, le=_MAX_INDEX)]
Shape = tuple[int, ...]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One operation on indices.

    Attributes:
        op: ``select`` (dim, index), ``slice`` (dim, start, stop, step), ``permute``
            (dims) or ``reshape`` (sizes).
        args: its arguments, none of them negative.
    """

    op: Literal["select", "slice", "permute", "reshape"]
    args: Annotated[tuple[Index, ...], Meta(max_length=_MAX_DIMS)]


Steps = Annotated[tuple[Step, ...], Meta(max_length=32)]


class Operand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a view takes of one source tensor.

    Attributes:
        source: name of a tensor of the table, or of an alias of one.
        steps: in order.
    """

    source: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    steps: Steps = ()


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One checkpoint tensor.

    Attributes:
        name: checkpoint name.
        parts: one, or several that are joined along ``dim``.
        dim: dimension along which parts are joined.
        steps: done to the joined parts, in order.
    """

    name: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    parts: Annotated[tuple[Operand, ...], Meta(min_length=1, max_length=1 << 16)]
    dim: Annotated[int, Meta(ge=0, lt=_MAX_DIMS)] = 0
    steps: Steps = ()

    def sources(self) -> set[str]:
        """Names of the tensors that it is made of."""
        return {part.source for part in self.parts}


def shape_of(view: View, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a view; checks every step of it.

    Args:
        shapes: of the source tensors, by name.

    Raises:
        TableMismatch: a source is unknown, or a step doesn't fit; names the view.
    """
    found: list[Shape] = []
    for part in view.parts:
        if part.source not in shapes:
            raise TableMismatch(
                f"checkpoint tensor {view.name!r} is a view of {part.source!r}, which isn't in "
                "the table: send all that the conversion needs"
            )
        found.append(_walk(view.name, shapes[part.source], part.steps))
    shape = found[0]
    if len(found) > 1:
        dim = view.dim
        if any(
            len(other) != len(shape)
            or dim >= len(shape)
            or other[:dim] + other[dim + 1 :] != shape[:dim] + shape[dim + 1 :]
            for other in found
        ):
            raise _misfit(view.name, shape, f"join along {dim} of {found[:4]}")
        shape = (*shape[:dim], sum(other[dim] for other in found), *shape[dim + 1 :])
    return _walk(view.name, shape, view.steps)


def apply_view(view: View, tensor: Callable[[str], Tensor]) -> Tensor:
    """A checkpoint tensor, as a view of its source where that can be one.

    Args:
        tensor: gives source tensors, whole, by name.
    """
    parts = [_apply(tensor(part.source), part.steps) for part in view.parts]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, view.dim)
    return _apply(joined, view.steps)


def _apply(tensor: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        args = step.args
        if step.op == "select":
            tensor = tensor.select(args[0], args[1])
        elif step.op == "slice":
            dim, start, stop, stride = args
            tensor = tensor[(slice(None),) * dim + (slice(start, stop, stride),)]
        elif step.op == "permute":
            tensor = tensor.permute(args)
        else:
            tensor = tensor.reshape(args)
    return tensor


def _walk(name: str, shape: Shape, steps: Sequence[Step]) -> Shape:
    for step in steps:
        args = step.args
        fits = False
        if step.op == "select" and len(args) == 2:
            dim, index = args
            fits = dim < len(shape) and index < shape[dim]
            result = (*shape[:dim], *shape[dim + 1 :])
        elif step.op == "slice" and len(args) == 4:
            dim, start, stop, stride = args
            fits = dim < len(shape) and start <= stop <= shape[dim] and stride >= 1
            result = shape
            if fits:
                result = (*shape[:dim], -(-(stop - start) // stride), *shape[dim + 1 :])
        elif step.op == "permute":
            fits = sorted(args) == list(range(len(shape)))
            result = tuple(shape[dim] for dim in args) if fits else shape
        elif step.op == "reshape":
            fits = math.prod(args) == math.prod(shape)
            result = args
        if not fits:
            raise _misfit(name, shape, f"{step.op}{args}")
        shape = result
    return shape


def _misfit(name: str, shape: Shape, what: str) -> TableMismatch:
    return TableMismatch(
        f"checkpoint tensor {name!r}: {what} doesn't fit a tensor of shape {shape}; "
        "run one weightwire version on both sides"
    )


# ------------------------------------------------------------------ recording


def record_views(
    sources: Mapping[str, tuple[Shape, torch.dtype]],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> tuple[View, ...]:
    """Run a conversion on tensors without data, and write down what it does.

    Args:
        sources: global shape and dtype of each of the trainer's tensors, by name.
        convert: takes tensors by those names and returns checkpoint tensors by theirs.

    Returns:
        One view for each checkpoint tensor that isn't simply a source of the same name.

    Raises:
        TraceError: it does something to a tensor that is no operation on indices.
    """
    given = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in sources.items()
    }
    recorder = _Recorder(given)
    with torch.no_grad(), recorder:
        made = dict(convert(dict(given)))
    views = [recorder.view(name, tensor) for name, tensor in made.items()]
    taken = {source for view in views for source in view.sources() if not _is_identity(view)}
    # A source that is itself a checkpoint tensor, and part of another, needs to say so.
    return tuple(view for view in views if not _is_identity(view) or view.name in taken)


def _is_identity(view: View) -> bool:
    return view.steps == () and view.parts == (Operand(view.name),)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        # By identity, which lasts as long as the tensor: so both are kept.
        self._known = {id(t): (t, View(name, (Operand(name),))) for name, t in given.items()}

    def view(self, name: str, tensor: Tensor) -> View:
        """How a result came about."""
        if id(tensor) not in self._known:
            raise TraceError(
                f"checkpoint tensor {name!r} isn't made of the trainer's tensors alone: give "
                "open_sender a WeightSource that yields checkpoint tensors instead"
            )
        return msgspec.structs.replace(self._known[id(tensor)][1], name=name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(id(tensor) in self._known for tensor in operands):
            return result
        name = func._schema.name.rpartition("::")[2]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        chains: list[View] | None = None
        if all(id(tensor) in self._known for tensor in operands):
            views = [self._known[id(tensor)][1] for tensor in operands]
            if name in ("cat", "stack"):
                joined = _joined(name, operands, views, args, kwargs)
                chains = None if joined is None else [joined]
            elif (
                len(operands) == 1
                and name in _RULES
                and all(out.dtype == operands[0].dtype for out in results)
            ):
                steps = _RULES[name](operands[0], args[1:], kwargs, results)
                chains = [_extended(views[0], chain) for chain in steps]
        if chains is None:
            known = next(self._known[id(t)][1] for t in operands if id(t) in self._known)
            raise TraceError(
                f"tensor {known.parts[0].source!r}: its conversion to checkpoint names does "
                f"{func}, which can't travel in a table: give open_sender a WeightSource that "
                "yields checkpoint tensors instead"
            )
        for tensor, chain in zip(results, chains, strict=True):
            self._known[id(tensor)] = (tensor, chain)
        return result


def _extended(view: View, steps: Sequence[Step]) -> View:
    if len(view.parts) == 1:
        part = view.parts[0]
        parts = (msgspec.structs.replace(part, steps=(*part.steps, *steps)),)
        return msgspec.structs.replace(view, parts=parts)
    return msgspec.structs.replace(view, steps=(*view.steps, *steps))


def _joined(
    name: str, operands: Sequence[Tensor], views: list[View], args: Any, kwargs: dict[str, Any]
) -> View | None:
    dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
    dims = operands[0].dim() + (name == "stack")
    dim %= max(dims, 1)
    if name == "stack":
        shape = tuple(operands[0].shape)
        sizes = (*shape[:dim], 1, *shape[dim:])
        views = [_extended(view, (Step("reshape", sizes),)) for view in views]
    if len(views) == 1:
        return views[0]
    if any(len(view.parts) > 1 for view in views):
        return None  # joined twice over
    return View(views[0].name, tuple(view.parts[0] for view in views), dim)


Chains = list[tuple[Step, ...]]


def _argument(args: Any, kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(name, default)


def _same(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    return [() for _ in out]


def _reshaped(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    return [(Step("reshape", tuple(o.shape)),) if o.shape != t.shape else () for o in out]


def _permuted(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    dims = tuple(int(d) % t.dim() for d in _argument(args, kwargs, 0, "dims", ()))
    return [(Step("permute", dims),)]


def _transposed(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    dims = list(range(t.dim()))
    if t.dim() > 1:
        a = int(_argument(args, kwargs, 0, "dim0", 0)) % t.dim()
        b = int(_argument(args, kwargs, 1, "dim1", 1)) % t.dim()
        dims[a], dims[b] = dims[b], dims[a]
    return [(Step("permute", tuple(dims)),)]


def _sliced(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    dim = int(_argument(args, kwargs, 0, "dim", 0)) % t.dim()
    size = t.shape[dim]
    start = _argument(args, kwargs, 1, "start", None)
    stop = _argument(args, kwargs, 2, "end", None)
    step = int(_argument(args, kwargs, 3, "step", 1))
    start, stop, _ = slice(start, stop).indices(size)
    return [(Step("slice", (dim, start, max(start, stop), step)),)]


def _selected(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    dim = int(_argument(args, kwargs, 0, "dim", 0)) % t.dim()
    index = int(_argument(args, kwargs, 1, "index", 0)) % t.shape[dim]
    return [(Step("select", (dim, index)),)]


def _split(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    dim = int(_argument(args, kwargs, 1, "dim", 0)) % t.dim()
    chains: Chains = []
    begin = 0
    for piece in out:
        end = begin + piece.shape[dim]
        chains.append((Step("slice", (dim, begin, end, 1)),))
        begin = end
    return chains


def _unbound(t: Tensor, args: Any, kwargs: dict[str, Any], out: list[Tensor]) -> Chains:
    dim = int(_argument(args, kwargs, 0, "dim", 0)) % t.dim()
    return [(Step("select", (dim, i)),) for i in range(len(out))]


_RULES: dict[str, Callable[[Tensor, Any, dict[str, Any], list[Tensor]], Chains]] = {
    **dict.fromkeys(("alias", "detach", "clone", "_to_copy", "lift_fresh"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"), _reshaped),
    "permute": _permuted,
    "transpose": _transposed,
    "t": _transposed,
    "slice": _sliced,
    "select": _selected,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbound,
}
"""Operators that rearrange elements and change none, by the chain of each result."""
