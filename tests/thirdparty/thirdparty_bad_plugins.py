"""One small distribution for every way in which a plug-in can be wrong."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BAD", "HANGS", "Bad", "write_projects"]

GOOD = """
import time
import weightwire
from weightwire.contract import Backend, BackendConfig, Capabilities

class Pigeon(Backend):
    name, summary, config = "{name}", "carrier pigeons", BackendConfig
    capabilities = Capabilities("pull", "applied", True, False, True, False, True)

    def open_sender(self, context): ...
    def open_receiver(self, context): ...

@weightwire.hookimpl
def weightwire_describe_backend():
    return Pigeon()
"""


@dataclass(frozen=True)
class Bad:
    """A distribution ``pigeon-<name>`` whose backend ``<name>`` is wrong.

    Attributes:
        change: what is replaced in a plug-in that works, and by what.
        says: what its error must say, in this order, besides the distribution.
    """

    name: str
    change: tuple[str, str]
    says: tuple[str, ...]
    error: str = "PluginError"

    @property
    def distribution(self) -> str:
        return f"pigeon-{self.name} 1.0"


BAD = (
    Bad(
        "absent-library",
        ("import time", "import a_library_that_is_not_there"),
        ("doesn't import", "a_library_that_is_not_there", "reinstall or remove it"),
    ),
    Bad(
        "exits",
        ("import time", "raise SystemExit('not today')"),
        ("doesn't import", "not today", "reinstall or remove it"),
    ),
    Bad(
        "misspelt",
        ("def weightwire_describe_backend", "def weightwire_descibe_backend"),
        ("unknown hook 'weightwire_descibe_backend'", "weightwire_describe_backend"),
    ),
    Bad(
        "unmarked",
        ("@weightwire.hookimpl", ""),
        ("without its mark", "decorate it with weightwire.hookimpl"),
    ),
    Bad(
        "other-arguments",
        ("describe_backend()", "describe_backend(weather)"),
        ("doesn't fit the hooks", "weather", "upgrade it"),
    ),
    Bad(
        "wrong-type",
        ("return Pigeon()", "return {'name': 'pigeon'}"),
        ("returned a dict", "return a weightwire.contract.Backend"),
    ),
    Bad(
        "class-not-instance",
        ("return Pigeon()", "return Pigeon"),
        ("returned a", "return a weightwire.contract.Backend"),
    ),
    Bad(
        "unfinished",
        ("    def open_receiver(self, context): ...", ""),
        ("failed in weightwire_describe_backend", "open_receiver", "upgrade or remove it"),
    ),
    Bad(
        "old-contract",
        ("    def open_sender", "    api = 99\n\n    def open_sender"),
        ("written for contract 99", "install versions that match"),
    ),
    Bad(
        "not-pydantic",
        ('"carrier pigeons", BackendConfig', '"carrier pigeons", dict'),
        ("config", "a pydantic model"),
    ),
    Bad(
        "no-capabilities",
        ('Capabilities("pull", "applied", True, False, True, False, True)', "None"),
        ("declares no Capabilities",),
    ),
    Bad(
        "raises-in-probe",
        ("    def open_sender", "    def probe(self):\n        1 / 0\n\n    def open_sender"),
        ("can't run here", "ZeroDivisionError"),
        "BackendUnavailable",
    ),
    Bad(
        "hangs",
        ("    def open_sender", "    def probe(self): time.sleep(30)\n\n    def open_sender"),
        ("didn't finish its probe within",),
        "BackendUnavailable",
    ),
)

HANGS = "pigeon-hangs"
"""Installed apart: who lists all backends waits for it."""

OBSERVER = """
import weightwire

@weightwire.hookimpl
def weightwire_published(record):
    raise RuntimeError("the log is full")
"""

SCHEME = """
from weightwire.session import SessionScheme

class Scheme(SessionScheme):
    scheme, summary = "sqlite", "another one"
    def open(self, request): ...

@weightwire.hookimpl
def weightwire_describe_session_scheme():
    return Scheme()
"""


def write_projects(directory: Path) -> list[Path]:
    """Their sources, each an installable project."""
    projects: list[Path] = []
    for bad in BAD:
        old, new = bad.change
        body = GOOD.format(name=bad.name)
        assert old in body
        projects.append(_write(directory, f"pigeon-{bad.name}", bad.name, body.replace(old, new)))
    impostor = GOOD.format(name="acme") + SCHEME
    projects.append(_write(directory, "pigeon-impostor", "impostor", impostor))
    projects.append(_write(directory, "pigeon-observer", "observer", OBSERVER))
    return projects


def _write(directory: Path, distribution: str, entry_point: str, body: str) -> Path:
    project = directory / distribution
    project.mkdir()
    module = distribution.replace("-", "_")
    (project / f"{module}.py").write_text(body)
    (project / "pyproject.toml").write_text(
        textwrap.dedent(
            f"""
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"

            [project]
            name = "{distribution}"
            version = "1.0"

            [project.entry-points.weightwire]
            {entry_point} = "{module}"

            [tool.hatch.build.targets.wheel]
            only-include = ["{module}.py"]
            """
        )
    )
    return project
