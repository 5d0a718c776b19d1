"""The third-party projects, installed as their users would, and processes that use them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests

from thirdparty_bad_plugins import write_projects
from thirdparty_rig import PROJECTS, Pool, World, install


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the three projects installed in it."""
    return install(tmp_path_factory.mktemp("site"), *PROJECTS)


@pytest.fixture(scope="session")
def bad_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with distributions that are wrong."""
    projects = write_projects(tmp_path_factory.mktemp("bad-projects"))
    return install(tmp_path_factory.mktemp("bad-site"), *projects)


@pytest.fixture(scope="session")
def pool(site: Path) -> Iterator[Pool]:
    with Pool(site) as pool:
        yield pool


@pytest.fixture
def world(pool: Pool, tmp_path: Path) -> Iterator[World]:
    """Processes over acme, in a SQLite session, that all log to one file."""
    with World(pool, tmp_path) as world:
        yield world
