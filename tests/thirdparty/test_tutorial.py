"""``docs/writing-a-backend.md`` is the acme project, block by block."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from thirdparty_rig import HERE, install, weightwire

PAGE = (HERE.parents[1] / "docs" / "writing-a-backend.md").read_text()
ACME = HERE / "weightwire-acme"


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


BEFORE, CHECKS = PAGE.split("## 8.")
"""The last section's module is another."""


@pytest.mark.parametrize(
    ("language", "page", "file"),
    [
        ("python", BEFORE, "weightwire_acme.py"),
        ("python", CHECKS, "weightwire_acme_doctor.py"),
        ("toml", PAGE, "pyproject.toml"),
    ],
)
def test_the_blocks_in_their_order_are_the_project(language: str, page: str, file: str) -> None:
    """Whoever copies them one after another has the backend that the kit proves."""
    source = (ACME / file).read_text()
    assert all(block in source for block in blocks(language, page))
    assert lines("".join(blocks(language, page))) == lines(source)


def test_weightwire_lists_it_after_two_sections(tmp_path: Path) -> None:
    """As the page promises, before the transports are written."""
    begun = PAGE[: PAGE.index("## 3.")]
    project = tmp_path / "weightwire-acme"
    project.mkdir()
    (project / "README.md").write_text("Pigeons.\n")
    (project / "pyproject.toml").write_text(blocks("toml")[0])
    (project / "weightwire_acme.py").write_text("\n\n".join(blocks("python", begun)))
    site = install(tmp_path / "site", project)
    rows = json.loads(weightwire("backends", "--json", sites=(site,)).stdout)["backends"]
    assert [row["available"] for row in rows if row["name"] == "acme"] == [True]


def test_it_names_the_commands_that_prove_it() -> None:
    assert [block for block in blocks("sh") if "conformance]" not in block] == [
        "weightwire conformance acme --quick\n",
        "weightwire doctor acme\n",
    ]


def test_the_doctor_tries_what_it_brings(tmp_path: Path) -> None:
    site = install(tmp_path / "site", ACME)
    checks = json.loads(weightwire("doctor", "acme", "--json", sites=(site,)).stdout)["checks"]
    assert {check["name"]: check["state"] for check in checks} == {
        "acme.probe": "ok",
        "acme.connect": "ok",
    }
