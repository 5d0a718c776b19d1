"""Inputs mutated from valid ones: by bytes, and by what they say in JSON or msgpack."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

__all__ = ["mutate"]

INTERESTING = (
    *(-1, 0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 65536, 1 << 20, 1 << 24, 1 << 31, 1 << 32),
    *(1 << 40, (1 << 50) + 1, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
)
WORDS = ("", ".", "..", "../x", "/etc/passwd", "a\0b", "\ud7ff", "x" * 300, "0", "-1", "é", "w")


def mutate(seeds: Sequence[bytes], generator: random.Random) -> bytes:
    """One input: of each four, one by bytes, two by structure, one by both."""
    value = generator.choice(seeds)
    kind = generator.randrange(4)
    if kind > 0:
        value = _by_structure(value, generator)
    if kind in (0, 3):
        for _ in range(generator.randrange(1, 5)):
            value = generator.choice(_BYTES)(value, seeds, generator)
    return value


def _by_structure(value: bytes, generator: random.Random) -> bytes:
    for decode, encode in (
        (msgspec.json.decode, lambda tree: json.dumps(tree).encode()),
        (msgspec.msgpack.decode, msgspec.msgpack.encode),
    ):
        try:
            tree = decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
            continue
        if not isinstance(tree, list | dict):
            continue
        for _ in range(generator.choice((1, 1, 2, 4))):
            tree = _changed(tree, generator)
        try:
            return encode(tree)
        except (TypeError, ValueError, OverflowError):
            return value
    return value


def _changed(tree: Any, generator: random.Random) -> Any:
    """The tree with one place in it changed."""
    if isinstance(tree, dict) and tree and generator.random() < 0.85:
        key = generator.choice(list(tree))
        tree = dict(tree)
        match generator.randrange(12):
            case 0:
                del tree[key]
            case 1:
                other = _leaf(key, generator)
                tree[str(other) if isinstance(other, list | dict) else other] = tree[key]
            case _:
                tree[key] = _changed(tree[key], generator)
        return tree
    if isinstance(tree, list) and tree and generator.random() < 0.85:
        at = generator.randrange(len(tree))
        match generator.randrange(12):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return [*tree, tree[at]]
            case 2:
                other = generator.randrange(len(tree))
                tree = list(tree)
                tree[at], tree[other] = tree[other], tree[at]
                return tree
            case 3:
                return tree * generator.choice((2, 50))
            case _:
                return [*tree[:at], _changed(tree[at], generator), *tree[at + 1 :]]
    return _leaf(tree, generator)


def _leaf(value: Any, generator: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int() if generator.random() < 0.8:
            if generator.random() < 0.5:
                return value + generator.choice((-2, -1, 1, 2))
            return generator.choice(INTERESTING)
        case float() if generator.random() < 0.8:
            return generator.choice((0.0, -1.0, 1e308, float("inf"), float("nan"), 5e-324))
        case str() if generator.random() < 0.8:
            if value and generator.random() < 0.5:
                at = generator.randrange(len(value))
                return value[:at] + generator.choice(("", "0", "x", "/", "\0")) + value[at + 1 :]
            return generator.choice(WORDS)
        case bytes() if generator.random() < 0.8:
            if value and generator.random() < 0.7:
                at = generator.randrange(len(value))
                return value[:at] + bytes([generator.randrange(256)]) + value[at + 1 :]
            return generator.choice((b"", b"\0" * 8, b"\xff" * 32, value[: len(value) // 2]))
    return generator.choice(
        (None, 0, -1, 1 << 63, "", "x", b"x", 1.5, True, [], {}, [[]], {"x": 1})
    )


def _flip(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    if not value:
        return b"\0"
    at = generator.randrange(len(value))
    return value[:at] + bytes([value[at] ^ (1 << generator.randrange(8))]) + value[at + 1 :]


def _set(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    at = generator.randrange(len(value) + 1)
    return value[:at] + bytes([generator.randrange(256)]) + value[at + 1 :]


def _cut(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    return value[: generator.randrange(len(value) + 1)]


def _drop(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    at = generator.randrange(len(value) + 1)
    return value[:at] + value[at + generator.randrange(1, 9) :]


def _insert(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    at = generator.randrange(len(value) + 1)
    return value[:at] + generator.randbytes(generator.randrange(1, 9)) + value[at:]


def _repeat(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    begin = generator.randrange(len(value) + 1)
    end = min(len(value), begin + generator.randrange(1, 65))
    return value[:begin] + value[begin:end] * generator.choice((2, 3, 200)) + value[end:]


def _splice(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    other = generator.choice(seeds)
    return (
        value[: generator.randrange(len(value) + 1)] + other[generator.randrange(len(other) + 1) :]
    )


def _number(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    """A number of 4 or 8 bytes, where lengths and offsets may be."""
    size = generator.choice((4, 8))
    at = generator.randrange(len(value) + 1)
    number = generator.choice(INTERESTING) % (1 << (8 * size))
    return (
        value[:at] + number.to_bytes(size, generator.choice(("big", "little"))) + value[at + size :]
    )


def _length(value: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    """A msgpack head that says that much follows, or that it nests deeply."""
    at = generator.randrange(len(value) + 1)
    head = generator.choice(
        (
            b"\xdd\x7f\xff\xff\xff",
            b"\xdf\x7f\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\x91" * 3000,
            b"[" * 3000,
            b"\x81\x00" * 2000,
            b'{"a":' * 2000,
            b"\xc1",
            b"\xd4\x00\x00",
        )
    )
    return value[:at] + head + value[at:]


_BYTES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    *(_flip, _flip, _set, _set, _cut, _drop, _insert, _repeat, _splice, _number),
    _length,
)
