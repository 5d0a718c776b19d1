"""Collected by ``pytest --pyargs weightwire_conformance``: every case, over every backend."""

from __future__ import annotations

from typing import Any

import pytest

__all__: list[str] = []

_PLUGIN = "weightwire-conformance-run"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plugin = metafunc.config.pluginmanager.get_plugin(_PLUGIN)
    if plugin is None:
        raise pytest.UsageError("no backend to prove: give --weightwire-backend NAME")
    plugin.parametrize(metafunc)


def test_scenario(request: pytest.FixtureRequest, backend_name: str, case_name: str) -> None:
    plugin: Any = request.config.pluginmanager.get_plugin(_PLUGIN)
    plugin.prove(backend_name, case_name, request.node.user_properties)
