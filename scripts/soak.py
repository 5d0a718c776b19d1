"""Run the soak: every test marked ``soak``, and write what happened to ``results/soak.json``.

The file holds the commit, the seed, the machine and each test's outcome and
seconds; docs cite it.  A run with the same seed makes the same random choices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "soak.json")
    parser.add_argument("--all", action="store_true", help="also tests that aren't soak")
    parser.add_argument("-k", default="", help="only tests whose names match")
    parser.add_argument("--seconds", type=float, help="stop then; what is left isn't in the file")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="not what passed there")
    parser.add_argument("tests", nargs="*", help="folders or files; all by default")
    arguments = parser.parse_args()
    print(f"soak with seed {arguments.seed}", flush=True)
    began = time.time()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "junit.xml"
        command = [
            *(sys.executable, "-m", "pytest", "--timeout", "3600"),
            *(() if arguments.all else ("-m", "soak")),
            *(("-k", arguments.k) if arguments.k else ()),
            *("-o", "junit_family=xunit1", f"--junitxml={report}"),
            *(f"--deselect={test}" for path in arguments.done for test in _passed(path)),
            *arguments.tests,
        ]
        environment = {**os.environ, "WEIGHTWIRE_SEED": str(arguments.seed)}
        code = _run(command, environment, arguments.seconds)
        tests = _read(report) if report.exists() else []
    result = {
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain")),
        "seed": arguments.seed,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds": round(time.time() - began, 1),
        "exit_code": code,
        "counts": {
            outcome: sum(test["outcome"] == outcome for test in tests)
            for outcome in ("passed", "failed", "skipped")
        },
        "tests": tests,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.out}")
    return code


def _run(command: list[str], environment: dict[str, str], seconds: float | None) -> int:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        # In a shell's background SIGINT is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then writes what it has
        return process.wait(60)
    finally:
        process.kill()


def _passed(path: Path) -> list[str]:
    tests = json.loads(path.read_text())["tests"]
    names = [test["test"] for test in tests if test["outcome"] == "passed"]
    return [
        module.replace(".", "/") + ".py::" + name
        for module, _, name in (name.partition("::") for name in names)
    ]


def _read(report: Path) -> list[dict[str, object]]:
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - our own pytest wrote it
        if not case.get("classname"):
            continue  # how an interrupted run says that it was
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = (
            "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        )
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        tests.append(
            {
                "test": f"{case.get('classname')}::{case.get('name')}",
                "outcome": outcome,
                "seconds": float(case.get("time") or 0),
                **({"properties": properties} if properties else {}),
            }
        )
    return tests


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments],  # noqa: S607 - git from the path
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
