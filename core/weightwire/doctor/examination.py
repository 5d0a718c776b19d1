"""Runs checks in children, a lane of them for each group, and collects the verdicts."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from weightwire.doctor.builtin import CHECKS
from weightwire.doctor.check import Check, CheckOptions, Finding, State, Verdict
from weightwire.doctor.children import Child, Step
from weightwire.doctor.directory import remove_places

__all__ = ["Examination", "examine"]

_START_SECONDS = 120.0
"""For a child to import torch, on a machine that is busy or a filesystem that is slow."""
_LIST_SECONDS = 120.0
_LANES = 3
_PAUSE = 0.02
_CHECK = "weightwire.doctor.worker:check"
_LISTING = "weightwire.doctor.listing:"
_REMEDY = "report it, with what `--json` prints"

Told = Callable[[Finding], None]


class Examination:
    """The checks of this installation.

    Args:
        session, directory: see ``CheckOptions``.
        environment: of the children; by default this process's.
        loading_seconds: most that loading all plug-ins may take, and then each of them.

    Use it as a context manager: it owns a directory and child processes.
    """

    def __init__(
        self,
        *,
        session: str = "",
        directory: str = "",
        environment: Mapping[str, str] | None = None,
        loading_seconds: float = _LIST_SECONDS,
    ) -> None:
        self._loading_seconds = loading_seconds
        self._session, self._directory = session, directory
        self._environment = environment
        self._scratch = Path(tempfile.mkdtemp(prefix="weightwire-doctor-"))
        self._children: set[Child] = set()
        self._lock = threading.Lock()
        self._closed = False

    def known(self) -> tuple[list[Check], list[Finding]]:
        """All checks; and what is already known of plug-ins that can't be used."""
        from weightwire.doctor.listing import Listed

        findings: list[Finding] = []
        skip: list[str] = []
        progress = self._scratch / "loading"
        while True:
            progress.write_text("")
            value, death = self._ask(f"{_LISTING}everything", [skip, str(progress)])
            if value is not None:
                listed = msgspec.convert(value, Listed)
                return listed.checks, findings + [_broken(*broken) for broken in listed.broken]
            # One of them ends the process, or holds it: the others are loaded without it.
            begun = progress.read_text().split()
            findings.append(_broken(begun[-1] if begun else "all", f"loading it: {death}"))
            if not begun or begun[-1] in skip:
                return list(CHECKS), findings
            skip.append(begun[-1])

    def run(self, checks: Sequence[Check], tell: Told = lambda _: None) -> list[Finding]:
        """Run these, groups beside each other; the findings in the order of the checks.

        Args:
            tell: called with each finding, one at a time, as soon as it is there.
        """
        groups: dict[str, list[Check]] = {}
        for check in checks:
            groups.setdefault(check.group, []).append(check)
        found: dict[str, Finding] = {}
        telling = threading.Lock()

        def note(finding: Finding) -> None:
            with telling:
                found[finding.check.name] = finding
                tell(finding)

        with ThreadPoolExecutor(_LANES) as lanes:
            try:
                for _ in lanes.map(lambda group: self._lane(group, note), groups.values()):
                    pass
            except BaseException:
                self._end_children()
                raise
        return [found[check.name] for check in checks if check.name in found]

    def _lane(self, checks: list[Check], note: Told) -> None:
        left = list(checks)
        while left and not self._closed:
            steps = [Step(_CHECK, [c.function, self._options(c), c.arguments]) for c in left]
            seconds = _START_SECONDS + sum(check.seconds for check in left)
            with self._child(steps, seconds) as child:
                done = self._follow(child, left, note)
            left = left[done:]

    def _follow(self, child: Child, checks: Sequence[Check], note: Told) -> int:
        """Note verdicts until the child ends; how many checks that was."""
        begun = time.monotonic()
        seen, done = 0, 0
        while True:
            over = child.is_over  # before its answers are read: none comes after that
            for line in child.answers()[seen:]:
                seen += 1
                if seen % 2:
                    begun = time.monotonic()
                    continue
                took = time.monotonic() - begun
                note(Finding(checks[done], _verdict(checks[done], line), took))
                done += 1
            if done == len(checks):
                return done
            running = seen % 2 == 1
            late = time.monotonic() - begun > (checks[done].seconds if running else _START_SECONDS)
            if over or late:
                break
            time.sleep(_PAUSE)
        child.kill()
        took = time.monotonic() - begun
        if not running and not done:
            # It didn't come to the first check: none of them can run.
            what = "didn't start in time" if late else child.death()
            summary = f"a Python process with weightwire {what}"
            remedy = "run `python -c 'import weightwire'`, and mend what it says"
            for check in checks:
                note(Finding(check, Verdict.failed(summary[:2000], remedy), took))
            return len(checks)
        check = checks[done]
        if late and not over:
            summary = f"it hangs: no verdict within {check.seconds:g} s"
        else:
            summary = f"it crashed: its process {child.death()}"
        details = {"log": child.log()}
        verdict = Verdict("failed", summary[:2000], check.remedy or _REMEDY, details)
        note(Finding(check, verdict, took))
        return done + 1

    def _options(self, check: Check) -> Any:
        scratch = Path(tempfile.mkdtemp(prefix=f"{check.name}-", dir=self._scratch))
        return msgspec.to_builtins(
            CheckOptions(str(scratch), self._session, self._directory, check.seconds)
        )

    def _ask(self, function: str, arguments: list[Any]) -> tuple[Any, str]:
        """What a function returns in a child, or how that ended."""
        with self._child([Step(function, arguments)], self._loading_seconds) as child:
            begun = time.monotonic()
            while not child.is_over and time.monotonic() - begun < self._loading_seconds:
                time.sleep(_PAUSE)
            lines = child.answers()
            if len(lines) < 2:
                late = f"it doesn't end within {self._loading_seconds:g} s"
                return None, f"the process {child.death()}" if child.is_over else late
            answer = msgspec.json.decode(lines[1])
            return answer.get("value"), str(answer.get("error", ""))

    @contextlib.contextmanager
    def _child(self, steps: Sequence[Step], seconds: float) -> Iterator[Child]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the examination is over")
            child = Child(steps, self._scratch, seconds, environment=self._environment)
            self._children.add(child)
        try:
            yield child
        finally:
            child.kill()
            with self._lock:
                self._children.discard(child)

    def _end_children(self) -> None:
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()

    def close(self) -> None:
        """End what still runs, and remove what it wrote.  Idempotent."""
        self._end_children()
        for scratch in self._scratch.glob("directory.*"):
            remove_places(scratch)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def examine(
    *names: str,
    session: str = "",
    directory: str = "",
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Findings of all checks, or of those whose name or group is named."""
    with Examination(session=session, directory=directory, environment=environment) as here:
        checks, broken = here.known()
        chosen = [c for c in checks if not names or c.name in names or c.group in names]
        return broken + here.run(chosen)


def _verdict(check: Check, line: bytes) -> Verdict:
    try:
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" not in answer:
            return msgspec.convert(answer["value"], Verdict)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
        return Verdict.failed(f"its answer can't be read: {error}"[:2000], check.remedy or _REMEDY)
    text = str(answer["error"])
    kind = str(answer.get("kind", ""))
    state: State = "absent" if kind == "BackendUnavailable" else "failed"
    first = text.splitlines()[0] if text else kind
    remedy = check.remedy or first.partition(": ")[2] or _REMEDY
    return Verdict(state, first[:2000], remedy[: 16 << 10])


def _broken(name: str, why: str) -> Finding:
    check = Check(f"plugins.{name}", f"loading the plug-in {name!r}", "weightwire.plugins:registry")
    first, _, rest = why.partition("\n")
    remedy = "reinstall, upgrade or remove the distribution that brings it"
    return Finding(check, Verdict("failed", first[:2000], remedy, {"more": rest[:4000]}), 0.0)
