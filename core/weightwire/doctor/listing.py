"""Which checks there are; asked in a child, because that loads plug-ins."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weightwire.contract import Backend
from weightwire.doctor.builtin import CHECKS
from weightwire.doctor.check import Check, CheckOptions, Verdict
from weightwire.errors import BackendUnavailable, PluginError
from weightwire.plugins import Registry, registry

__all__ = ["Listed", "everything", "probe_backend"]

_PROBE_SECONDS = 60.0


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is installed.

    Attributes:
        checks: core's, each backend's probe, and what plug-ins bring.
        broken: plug-ins that can't be used, with what they say.
    """

    checks: list[Check]
    broken: list[tuple[str, str]]


def everything(skip: list[str], progress: str) -> Listed:
    """Of all plug-ins but those to skip; each name is added to a file before it is loaded."""
    found = Registry()
    with Path(progress).open("a", buffering=1) as file:
        found.load_entry_points(skip, lambda name: file.write(f"{name}\n"))
    listed = _of(found)
    return Listed([*CHECKS, *listed.checks], listed.broken)


def _of(found: Registry) -> Listed:
    broken: dict[str, str] = {}
    probes = []
    for item in found.backends():
        if isinstance(item.value, Backend):
            probes.append(_probe(item.name, item.value.summary))
        else:
            broken[item.name] = str(item.error)
    brought = []
    for name in found.check_names():
        try:
            brought.append(found.check(name))
        except PluginError as error:
            broken[name] = str(error)
    return Listed(_by_group([*probes, *brought]), sorted(broken.items()))


def _probe(name: str, summary: str) -> Check:
    return Check(
        f"{name.replace('.', '-')}.probe",
        f"the {name} backend's own probe ({summary})",
        "weightwire.doctor.listing:probe_backend",
        _PROBE_SECONDS,
        f"choose another backend than {name}, or reinstall the library that it needs",
        [name],
    )


def _by_group(checks: list[Check]) -> list[Check]:
    groups = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: groups.index(check.group))


def probe_backend(options: CheckOptions, name: str) -> Verdict:
    """Run one backend's ``probe``."""
    del options
    backend = registry().backend(name)
    try:
        backend.probe()
    except BackendUnavailable as error:
        summary, _, remedy = str(error).partition(": ")
        return Verdict.absent(summary[:2000], remedy or str(error))
    return Verdict.ok("runs here")
