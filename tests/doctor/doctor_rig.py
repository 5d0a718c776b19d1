"""Runs checks in children whose environment is broken in one way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from weightwire.doctor import Check, Examination, Finding
from weightwire.doctor.builtin import CHECKS
from weightwire.memory import plugin as memory
from weightwire_nccl import plugin as nccl
from weightwire_nixl import plugin as nixl
from weightwire_vllm import doctor_plugin as vllm

ALL = {
    check.name: check
    for check in (
        *CHECKS,
        *memory.weightwire_describe_checks(),
        *nccl.weightwire_describe_checks(),
        *nixl.weightwire_describe_checks(),
        *vllm.weightwire_describe_checks(),
    )
}

LIBRARY = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int breaks(const char *what) {
    const char *set = getenv("BREAKS");
    return set && strstr(set, what);
}
int flock(int fd, int operation) { return 0; }  /* everybody gets it */
int fsync(int fd) {
    if (breaks("fsync")) { errno = EIO; return -1; }
    return fdatasync(fd);
}
int link(const char *from, const char *to) {
    if (breaks("link")) { errno = EOPNOTSUPP; return -1; }
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int rename(const char *from, const char *to) {  /* one that copies, as some filesystems do */
    const char *name = strrchr(to, '/');
    if (!breaks("rename") || !name || strcmp(name, "/record"))
        return renameat(AT_FDCWD, from, AT_FDCWD, to);
    char page[4096];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (ssize_t n; (n = read(in, page, sizeof page)) > 0;) {
        if (write(out, page, n) < 0) break;
        usleep(200);
    }
    close(in); close(out);
    return unlink(from);
}
"""


def examine(
    *names: str | Check,
    session: str = "",
    directory: Path | str = "",
    path: Path | None = None,
    **environment: str,
) -> dict[str, Finding]:
    """Findings by name.

    Args:
        path: a folder of modules that come before everybody's.
        environment: changes in it.
    """
    changed = {**os.environ, **environment}
    if path is not None:
        changed["PYTHONPATH"] = str(path)
    checks = [ALL[name] if isinstance(name, str) else name for name in names]
    with Examination(session=session, directory=str(directory), environment=changed) as here:
        found = here.run(checks)
    assert [finding.check for finding in found] == checks
    return {finding.check.name: finding for finding in found}


def verdict_of(finding: Finding) -> tuple[str, str, str]:
    """State, summary and remedy; whatever isn't ok has one."""
    verdict = finding.verdict
    assert verdict.remedy or verdict.state == "ok"
    return verdict.state, verdict.summary, verdict.remedy


def write_module(folder: Path, name: str, body: str) -> Path:
    """A module, found before any installed one of its name."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(body))
    return folder


def write_plugin(folder: Path, name: str, body: str) -> Path:
    """A distribution with one entry point."""
    write_module(folder, f"{name}_plugin", body)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[weightwire]\n{name} = {name}_plugin\n")
    return folder


def command(
    *arguments: str, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``weightwire doctor``, perhaps by another command that changes what it may do."""
    program = str(Path(sys.executable).parent / "weightwire")
    return subprocess.run(
        [*before, program, "doctor", *arguments],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip


def checks_of(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} isn't installed: what it breaks can't be broken")


def broken_filesystem(folder: Path) -> Path:
    """A library that makes file operations misbehave: ``BREAKS`` says which."""
    needs("cc")
    source, library = folder / "broken.c", folder / "broken.so"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library
