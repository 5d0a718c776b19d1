"""Weights from a seed: every process can make any version of them again, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Model = Mapping[str, Tensor] | nn.Module

BF16, F32 = torch.bfloat16, torch.float32


def random_bits(
    name: str, version: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Any bit pattern, NaNs included: what arrives is compared as bytes."""
    key = hashlib.blake2b(f"{seed}/{version}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    count = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def random_floats(
    name: str, version: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Ordinary numbers, for values that are cast on the way."""
    key = hashlib.blake2b(f"{seed}/{version}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def layers(count: int, width: int) -> Spec:
    spec: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"embed.weight": ((3, width), BF16)}
    for i in range(count):
        spec[f"layers.{i}.up.weight"] = ((width, 24), BF16)
        spec[f"layers.{i}.norm.weight"] = ((width,), F32)
        spec[f"layers.{i}.steps"] = ((), torch.int64)
    spec["head.weight"] = ((5, width), torch.float16)
    spec["mask"] = ((7,), torch.bool)
    spec["nothing"] = ((0, 4), F32)
    return spec


SPECS: dict[str, Spec] = {
    "small": layers(4, 96),
    "other-name": {**layers(4, 96), "layers.0.extra.weight": ((4,), F32)},
    "other-shape": {**layers(4, 96), "head.weight": ((6, 96), torch.float16)},
    "other-dtype": {**layers(4, 96), "head.weight": ((5, 96), BF16)},
    "misspelt": {
        name.replace("layers.3.up", "layers.3.upp"): spec for name, spec in layers(4, 96).items()
    },
    "wide": layers(4, 4096),
    "big": {f"layers.{i}.weight": ((1024, 1024), F32) for i in range(8)},
    "huge": {f"layers.{i}.weight": ((1024, 1024), F32) for i in range(4)},
    "huge-master": {f"layers.{i}.weight": ((2048, 1024), F32) for i in range(4)},
    "huge-rounded": {f"layers.{i}.weight": ((2048, 1024), BF16) for i in range(4)},
    "padded-vocabulary": {**layers(4, 96), "embed.weight": ((4, 96), BF16)},
    "scalars": {
        "zero_dim.float": ((), F32),
        "zero_dim.int": ((), torch.int64),
        "empty.rows": ((0, 3), BF16),
        "flags": ((9,), torch.bool),
        "float8.a": ((5, 7), torch.float8_e4m3fn),
        "float8.b": ((5, 7), torch.float8_e5m2),
        "bytes": ((11,), torch.uint8),
        "double": ((3, 2), torch.float64),
    },
    "escaping": {"../outside.weight": ((4,), F32)},
    "absolute": {"/etc/weight": ((4,), F32)},
    "control": {"bad\nname": ((4,), F32)},
}


def from_spec(name: str) -> dict[str, Tensor]:
    return {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in SPECS[name].items()}


class Router(nn.Module):
    """A mixture-of-experts block with master weights in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = nn.Linear(64, 32, bias=False, dtype=dtype)
        self.router = nn.Linear(16, 256, dtype=dtype)
        # Hundreds of values that bf16 would merge into a few.
        self.router.bias = nn.Parameter(torch.empty(256, dtype=torch.float32))


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 12, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1))


class Wrapper(nn.Module):
    """Adds a name component, as torch's wrappers do."""

    def __init__(self, component: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(component, inner)


def wrapped() -> nn.Module:
    checkpointed = Wrapper("_checkpoint_wrapped_module", nn.Linear(4, 6))
    block = nn.Sequential(checkpointed, nn.Linear(6, 2))
    return Wrapper("module", Wrapper("_orig_mod", Wrapper("_fsdp_wrapped_module", block)))


def colliding() -> nn.Module:
    """Two names that are one without their wrappers."""
    module = Wrapper("inner", nn.Linear(3, 3))
    module.add_module("module", Wrapper("inner", nn.Linear(3, 3)))
    return module


def noncontiguous() -> dict[str, Tensor]:
    base = torch.empty(20, 12)
    return {
        "strided": base[::2, ::3],
        "transposed": torch.empty(9, 5).t(),
        "narrowed": torch.empty(6, 30)[:, 4:17],
        "permuted": torch.empty(2, 3, 4, dtype=BF16).permute(2, 0, 1),
        "expanded": torch.empty(4, 1).expand(4, 6),
        "plain": torch.empty(5, 5),
    }


def noncontiguous_target() -> dict[str, Tensor]:
    """The same, but no element shares memory with another."""
    return {**noncontiguous(), "expanded": torch.empty(6, 4).t()}


def like(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(value.shape, dtype=value.dtype) for name, value in model.items()}


BUILDERS: dict[str, Callable[[], Model]] = {
    **{name: (lambda n=name: from_spec(n)) for name in SPECS},  # type: ignore[misc]
    "router-master": lambda: Router(torch.float32),
    "router": lambda: Router(torch.bfloat16),
    "tied": lambda: Tied(tie=True),
    "untied": lambda: Tied(tie=False),
    "normed": normed,
    "wrapped": wrapped,
    "unwrapped": lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)),
    "colliding": colliding,
    "noncontiguous": noncontiguous,
    "contiguous": lambda: like(noncontiguous()),
    "noncontiguous-target": noncontiguous_target,
}
_ORDINARY = {"router-master", "router", "tied", "untied", "normed", "wrapped", "unwrapped"} | {
    "huge-master"
}
_MASTERS = {"router": "router-master", "huge-rounded": "huge-master"}
_PREFIXES = ("module._orig_mod._fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def build(name: str) -> Model:
    return BUILDERS[name]()


def tensors_of(model: Model) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    return {key: value.detach() for key, value in state.items()}


def value_of(model_name: str, name: str, like: Tensor, version: int, seed: int) -> Tensor:
    """A tensor's value in a version, of the dtype of ``like``."""
    if name == "expanded":
        made = random_floats(name, version, seed, tuple(like.shape), like.dtype)
        return made[:, :1].expand(made.shape)
    ordinary = model_name in _ORDINARY or "contiguous" in model_name
    make = random_floats if ordinary else None
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    if model_name in _MASTERS:
        made = random_floats(name, version, seed, tuple(like.shape), torch.float32)
        return made.to(like.dtype)
    if make is not None:
        return make(name, version, seed, tuple(like.shape), like.dtype)
    return random_bits(name, version, seed, tuple(like.shape), like.dtype)


def fill(model_name: str, model: Model, version: int, seed: int) -> None:
    """Write a version in place, through whatever strides a tensor has."""
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            if 0 in tensor.stride() and tensor.numel() > 1:
                value = value_of(model_name, name, tensor, version, seed)
                tensor[:, :1].copy_(value[:, :1])
            else:
                tensor.copy_(value_of(model_name, name, tensor, version, seed))


def expected(model_name: str, model: Model, version: int, seed: int) -> dict[str, Tensor]:
    """What a target of this model must hold, made from the seed alone."""
    result = {}
    for name, tensor in tensors_of(model).items():
        value = value_of(model_name, name, tensor, version, seed)
        result[name] = value
    if model_name == "tied":  # filled in order: the last name decides
        result["embed.weight"] = result["lm_head.weight"]
    return result


def prefill(model: Model) -> None:
    """Bytes that no version has: NaNs, and -1 in integers."""
    with torch.no_grad():
        for tensor in tensors_of(model).values():
            if tensor.dtype == torch.bool or tensor.numel() == 0:
                tensor.fill_(True)
            else:
                tensor.copy_(
                    torch.full((tensor.nbytes,), 255, dtype=torch.uint8)
                    .view(tensor.dtype)
                    .reshape(tensor.shape)
                )


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
