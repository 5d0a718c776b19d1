"""Small distributions that are wrong, to be installed beside good ones."""

from __future__ import annotations

import textwrap
from pathlib import Path

__all__ = ["BAD", "write_projects"]

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


BAD = {
    "absent-library": ("import time", "import a_library_that_is_not_there"),
    "misspelt": ("def weightwire_describe_backend", "def weightwire_descibe_backend"),
    "old-contract": ("    def open_sender", "    api = 99\n\n    def open_sender"),
    "plain-config": ('"carrier pigeons", BackendConfig', '"carrier pigeons", dict'),
    "wrong-type": ("return Pigeon()", "return Pigeon"),
}
"""By backend: what is replaced in a plug-in that works, and by what."""

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
    projects = []
    for name, (old, new) in BAD.items():
        body = GOOD.format(name=name)
        assert old in body
        projects.append(_write(directory, f"pigeon-{name}", name, body.replace(old, new)))
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
