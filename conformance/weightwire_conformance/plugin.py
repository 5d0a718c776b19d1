"""The pytest plug-in of a run: which cases, their outcomes, and the reports at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from weightwire.errors import BackendNotFound, ConfigError, PluginError
from weightwire.plugins import registry
from weightwire_conformance.ahead import JOBS, Ahead
from weightwire_conformance.execute import Bench, Prepared, prepare
from weightwire_conformance.matrix import Matrix, as_property, from_property
from weightwire_conformance.outcomes import ExpectedFailure, Outcome, read_expected
from weightwire_conformance.reports.files import check_place
from weightwire_conformance.reports.html import html_page
from weightwire_conformance.reports.markdown import check_markdown, write_markdown
from weightwire_conformance.reports.terminal import print_matrix
from weightwire_conformance.rig import Pool
from weightwire_conformance.scenario import Case, cases

__all__ = ["ConformancePlugin"]

_REPORTS: Mapping[str, Callable[[Path, Matrix], object]] = {
    "json": lambda path, matrix: path.write_text(json.dumps(matrix.to_dict(), indent=2)),
    "html": lambda path, matrix: path.write_text(html_page(matrix)),
    "markdown": write_markdown,
}
_LETTERS = {
    Outcome.PASSED: (".", {"green": True}),
    Outcome.FAILED: ("F", {"red": True}),
    Outcome.UNSUPPORTED: ("u", {"cyan": True}),
    Outcome.XFAIL: ("x", {"yellow": True}),
    Outcome.UNAVAILABLE: ("n", {"yellow": True}),
}


class ConformancePlugin:
    """One run.

    Raises:
        pytest.UsageError: an option is wrong, or no such backend is installed.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pool: Pool | None = None
        self._ahead: Ahead | None = None
        self._planned: dict[str, list[Case]] = {}
        self._prepared: dict[str, Prepared] = {}
        self._matrix = Matrix()
        names = dict.fromkeys(config.getoption("--weightwire-backend"))
        try:
            self._names = [_installed(name) for name in names]
            self._options = _read_options(config.getoption("--weightwire-option"), self._names)
            known = [case.name for case in cases(large=True)]
            installed = {provided.name for provided in registry().backends()}
            self._expected: list[ExpectedFailure] = [
                failure
                for file in config.getoption("--weightwire-xfail")
                for failure in read_expected(Path(file), known, installed)
            ]
            self._check_reports()
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from None
        self._cases: dict[str, Case] = {
            case.name: case
            for case in cases(
                quick=config.getoption("--weightwire-quick"),
                large=config.getoption("--weightwire-large"),
            )
        }

    def _check_reports(self) -> None:
        for kind in _REPORTS:
            option = f"--weightwire-{kind}"
            if (name := self._config.getoption(option)) is not None:
                check_place(option, Path(name))
                if kind == "markdown":
                    check_markdown(Path(name))
        if (name := self._config.getoption("--junitxml", None)) is not None:
            check_place("--junitxml", Path(name), makes_directories=True)

    # -------------------------------------------------------------- running

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Every case over every backend."""
        pairs = [(name, case) for name in self._names for case in self._cases]
        metafunc.parametrize(
            ("backend_name", "case_name"), pairs, ids=[f"{name}-{case}" for name, case in pairs]
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is selected runs ahead of being asked for, unless other processes share it."""
        if hasattr(self._config, "workerinput"):  # pytest-xdist's, with a share of the items
            return
        for item in session.items:
            asked = getattr(getattr(item, "callspec", None), "params", {})
            if "backend_name" in asked and "case_name" in asked:
                planned = self._planned.setdefault(asked["backend_name"], [])
                planned.append(self._cases[asked["case_name"]])

    def prove(self, backend: str, case: str, properties: list[tuple[str, object]]) -> None:
        """Run one case; the test that calls this ends as its outcome says."""
        prepared = self._backend(backend)
        assert self._ahead is not None  # noqa: S101 - made with the first backend
        result = self._ahead.result(prepared, self._cases[case])
        # Not by record_property, which warns about JUnit dialects.
        properties.extend(as_property(result).items())
        match result.outcome:
            case Outcome.FAILED:
                pytest.fail(result.detail or result.reason, pytrace=False)
            case Outcome.XFAIL:
                pytest.xfail(result.reason)
            case Outcome.UNAVAILABLE:
                pytest.skip(f"unavailable: {result.reason}")

    def _backend(self, name: str) -> Prepared:
        if self._pool is None:
            self._pool = Pool(
                self._config.getoption("--weightwire-patience"),
                device=self._config.getoption("--weightwire-device"),
            )
            bench = Bench(
                self._pool,
                expected=self._expected,
                require=self._config.getoption("--weightwire-require"),
            )
            self._ahead = Ahead(bench, self._config.getoption("--weightwire-jobs") or JOBS)
        if name not in self._prepared:
            assert self._ahead is not None  # noqa: S101 - made just now
            for other in self._prepared:
                self._pool.end(other)
            self._prepared[name] = prepare(self._pool, name, self._options[name])
            self._ahead.begin(self._prepared[name], self._planned.get(name, ()))
        return self._prepared[name]

    def pytest_sessionfinish(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        if self._pool is not None:
            self._pool.close()
        if self._ahead is not None:
            self._ahead.join()

    # -------------------------------------------------------------- reporting

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # From the report, so that it is the same when the tests ran elsewhere (pytest-xdist).
        if report.when == "call":
            result = from_property(report.user_properties, report.longreprtext)
            if result is not None:
                self._matrix.add(result)

    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, Mapping[str, bool]]] | None:
        if report.when != "call":
            return None
        result = from_property(report.user_properties, "")
        if result is None or result.outcome not in (Outcome.UNSUPPORTED, Outcome.UNAVAILABLE):
            return None
        letter, markup = _LETTERS[result.outcome]
        return result.outcome.value, letter, (result.outcome.value, markup)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not len(self._matrix):
            return
        for name in self._names:
            if name in self._matrix.backends:
                self._matrix.capabilities[name] = _declared(name)
        print_matrix(self._matrix, terminalreporter)
        lost = []
        for kind, write in _REPORTS.items():
            path = self._config.getoption(f"--weightwire-{kind}")
            if path is None:
                continue
            try:
                write(Path(path), self._matrix)
            except (OSError, ConfigError) as error:
                lost.append(f"--weightwire-{kind} {path}: {error}")
            else:
                terminalreporter.write_line(f"wrote {path}")
        if lost:
            raise pytest.UsageError("\n".join(lost))


def _installed(name: str) -> str:
    """The name, if anything claims it: a broken plug-in is a result, a wrong name isn't."""
    try:
        registry().backend(name)
    except BackendNotFound:
        raise
    except PluginError:
        pass
    return name


def _declared(name: str) -> dict[str, Any]:
    try:
        capabilities = registry().backend(name).capabilities
    except PluginError:
        return {}
    return {field: getattr(capabilities, field) for field in capabilities.__dataclass_fields__}


def _read_options(texts: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """Options by backend: ``KEY=VALUE`` or a JSON object for all, or after ``NAME:`` for one."""
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in texts:
        prefix, colon, rest = text.partition(":")
        wanted, body = ([prefix], rest) if colon and prefix in options else (names, text)
        for name in wanted:
            options[name].update(_parse_option(body))
    return options


def _parse_option(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"option {text!r} isn't a JSON object: {error}") from None
        return dict(found)
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"option {text!r} isn't KEY=VALUE, nor a JSON object")
    try:
        return {key: json.loads(value)}
    except json.JSONDecodeError:
        return {key: value}
