"""pytest's command-line options; the plug-in itself is loaded only when one is used.

This module is a ``pytest11`` entry point and so part of every pytest run beside
an installed weightwire: it imports nothing but pytest's own types, and without
``--weightwire-backend`` or ``--weightwire-store`` it does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightwire", "conformance of weightwire backends")
    group.addoption(
        "--weightwire-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a backend to prove; may be given several times",
    )
    group.addoption(
        "--weightwire-store",
        action="append",
        default=[],
        metavar="URL",
        help="where session stores to prove can be made; may be given several times",
    )
    group.addoption(
        "--weightwire-option",
        action="append",
        default=[],
        metavar="[NAME:]KEY=VALUE",
        help="an option of the backend (VALUE is JSON, or text); or all of them as a JSON object",
    )
    group.addoption(
        "--weightwire-quick",
        action="store_true",
        help="each scenario's smallest case, and no soaks",
    )
    group.addoption(
        "--weightwire-large",
        action="store_true",
        help="also the scenarios that need gigabytes of memory",
    )
    group.addoption(
        "--weightwire-require",
        action="store_true",
        help="a backend that can't run here counts as FAILED",
    )
    group.addoption(
        "--weightwire-xfail",
        action="append",
        default=[],
        metavar="FILE",
        help="TOML file of expected failures, each with a reason, whose fault it is, and a link",
    )
    group.addoption(
        "--weightwire-patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for any answer of a process (default: 60)",
    )
    group.addoption(
        "--weightwire-device",
        default="cpu",
        metavar="DEVICE",
        help="where trainers' tensors and engines' weights lie: cpu (the default), or cuda",
    )
    group.addoption(
        "--weightwire-jobs",
        type=int,
        default=0,
        metavar="N",
        help="scenarios at once (default: two a processor, at most 8)",
    )
    for kind, what in (
        ("json", "results as JSON"),
        ("html", "one self-contained page"),
        ("markdown", "support table, between markers where FILE exists"),
    ):
        group.addoption(
            f"--weightwire-{kind}", default=None, metavar="FILE", help=f"write {what} to FILE"
        )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--weightwire-backend"):
        import pytest

        # A scenario's bare assert then shows what it compared.
        pytest.register_assert_rewrite("weightwire_conformance.scenarios")
        from weightwire_conformance.plugin import ConformancePlugin

        config.pluginmanager.register(ConformancePlugin(config), "weightwire-conformance-run")
    if config.getoption("--weightwire-store"):
        from weightwire_conformance.store_rig import StoresPlugin

        config.pluginmanager.register(StoresPlugin(config), "weightwire-stores-run")
