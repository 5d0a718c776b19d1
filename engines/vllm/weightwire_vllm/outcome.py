"""What a failed update left, told in the error's own text.

A worker's error reaches the engine core, and an HTTP client, as text and nothing
else.  Its last line says whether the engine may serve on, and both of them look for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from weightwire.errors import TransferError, WeightWireError

__all__ = ["MIXED", "WHOLE", "asleep", "is_asleep", "is_whole", "told"]

WHOLE = "the engine holds the weights that it held before"
MIXED = "the engine holds weights of two versions: it stays out of service until an update succeeds"


def told(error: Exception, *, mixed: bool) -> Exception:
    """The error, with what it left behind at the end of its message."""
    text = f"{error}\n{MIXED if mixed else WHOLE}"
    if isinstance(error, WeightWireError):
        error.args = (text,)
        return error
    made = TransferError(f"{type(error).__name__}: {text}")
    made.__cause__ = error
    return made


def is_whole(text: str) -> bool:
    """Whether an error's text says that nothing of the engine has changed."""
    return WHOLE in text and MIXED not in text


_ASLEEP = "asleep: wake it up first"


def asleep(call: str, tags: Iterable[str]) -> str:
    """Why a call is refused by an engine of which these parts of its memory sleep."""
    names = sorted(tags)
    query = "&".join(f"tags={name}" for name in names)
    return (
        f"{call} refused: memory of the engine ({', '.join(names)}) is {_ASLEEP} "
        f"(POST /wake_up?{query}, wake_up(tags={names}))"
    )


def is_asleep(text: str) -> bool:
    """Whether an error's text is ``asleep``'s."""
    return _ASLEEP in text
