"""Scenarios: functions that take a fleet, and what is known about them.

To add one, write a function in a module of ``weightwire_conformance.scenarios``::

    @scenario
    def tied_tensors_arrive_once(fleet: Fleet) -> None:
        sender, replica = fleet.sender("tied"), fleet.receiver(model="tied")
        fleet.exchange(sender, 1, replica)

Its name says what it proves.  It fails by raising; ``Fleet.close`` then looks at
what it left behind.  With ``cases``, it runs once for each, smallest first:
``--quick`` takes only that one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from weightwire_conformance.capabilities import Need
from weightwire_conformance.rig import Fleet

__all__ = ["Case", "cases", "scenario"]

Body = Callable[..., None]
B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class Case:
    """One run of a scenario.

    Attributes:
        name: the function's, with dashes, and the case's in brackets.
        theme: its module.
        need: a capability that may be missing; then it must be refused.
        soak: many repetitions; not in ``--quick``.
        large: needs gigabytes; only when asked for.
        long: begun before the others, which then run beside it.
        imports: modules that its processes need and that take seconds to import.
        smallest: the case that ``--quick`` takes.
    """

    name: str
    theme: str
    proves: str
    body: Body
    arguments: Mapping[str, Any] = field(default_factory=dict)
    need: Need | None = None
    soak: bool = False
    large: bool = False
    long: bool = False
    imports: Sequence[str] = ()
    smallest: bool = True

    def run(self, fleet: Fleet) -> None:
        self.body(fleet, **self.arguments)


_CASES: list[Case] = []


@overload
def scenario(body: B) -> B: ...
@overload
def scenario(
    *,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
    need: Need | None = None,
    needs: Mapping[str, Need] | None = None,
    soak: bool = False,
    large: bool = False,
    long: bool = False,
    imports: Sequence[str] = (),
) -> Callable[[B], B]: ...
def scenario(
    body: B | None = None,
    *,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
    need: Need | None = None,
    needs: Mapping[str, Need] | None = None,
    soak: bool = False,
    large: bool = False,
    long: bool = False,
    imports: Sequence[str] = (),
) -> B | Callable[[B], B]:
    """Mark a function as a scenario.

    Args:
        cases: arguments by case, smallest first; without, it runs once.
        need: the capability that it needs; ``needs`` gives one by case.
        soak, large, long, imports: see ``Case``.
    """

    def add(body: B) -> B:
        name = body.__name__.replace("_", "-")
        theme = body.__module__.rpartition(".")[2]
        proves = (body.__doc__ or name.replace("-", " ")).partition("\n")[0].rstrip(".")
        for number, (case, arguments) in enumerate((cases or {"": {}}).items()):
            _CASES.append(
                Case(
                    name=f"{name}[{case}]" if case else name,
                    theme=theme,
                    proves=proves,
                    body=body,
                    arguments=arguments,
                    need=(needs or {}).get(case, need),
                    soak=soak,
                    large=large,
                    long=long,
                    imports=tuple(imports),
                    smallest=number == 0,
                )
            )
        return body

    return add if body is None else add(body)


def cases(*, quick: bool = False, large: bool = False) -> Sequence[Case]:
    """All cases, in the order of themes and of their definition.

    Args:
        quick: each scenario's smallest case, soaks apart.
        large: also those that need gigabytes.
    """
    _load()
    return [
        case
        for case in _CASES
        if (large or not case.large) and (not quick or (case.smallest and not case.soak))
    ]


def _load() -> None:
    from weightwire_conformance import scenarios

    for theme in scenarios.THEMES:
        importlib.import_module(f"{scenarios.__name__}.{theme}")
    found = {module.name for module in pkgutil.iter_modules(scenarios.__path__)}
    assert found == set(scenarios.THEMES), f"THEMES and modules differ: {found}"  # noqa: S101
