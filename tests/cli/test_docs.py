"""The code in README and in the docs runs as it is printed.

A block that can't run here says so in a comment just above it, and why::

    <!-- not run: it installs from a package index -->

A page whose blocks another test runs says in which one.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?^```(?P<language>\S*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
ELSEWHERE = re.compile(r"<!-- this page's blocks run in (\S+) -->")
NAMED = re.compile(r"tests/[\w/]+\.py")
TEXT = {"", "toml", "mermaid"}
"""Languages of blocks that aren't code: pictures, and the project file of the tutorial."""


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    reason: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = [
        Block(match["language"], match["code"], match["reason"] or "")
        for match in FENCE.finditer(text)
    ]
    assert len(found) * 2 == len(re.findall(r"^```", text, re.MULTILINE))
    return [block for block in found if block.language not in TEXT]


def run_block(block: Block, place: Path) -> None:
    """A block of Python is a process; each line of shell is one command of ours."""
    code = block.code.replace("/tmp/run42", str(place / "run42"))
    if block.language == "python":
        commands = [[sys.executable, "-c", code]]
    else:
        assert block.language == "sh", f"a block in {block.language}: teach this test to run it"
        lines = [shlex.split(line, comments=True) for line in code.splitlines()]
        assert all(words[0] == "weightwire" for words in lines), f"mark what can't run: {code}"
        program = str(Path(sys.executable).parent / "weightwire")
        commands = [[program, *words[1:]] for words in lines]
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, check=False, cwd=place,
            env={**os.environ, "COLUMNS": "100"},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_says_why_it_does_not(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    found = blocks_of(page)
    for named in NAMED.findall(" ".join(block.reason for block in found)):
        assert (ROOT / named).is_file(), f"{page} names {named}"
    if elsewhere := ELSEWHERE.search(text):
        assert page in (ROOT / elsewhere[1]).read_text(), f"{elsewhere[1]} doesn't read {page}"
        return
    for block in found:
        if not block.reason and not (page == "README.md" and block.language == "python"):
            run_block(block, tmp_path)


def test_every_page_is_in_the_sites_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(f"docs/{name}" for name in listed) == [page for page in PAGES if "/" in page]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs isn't installed: pip install 'weightwire[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    built = subprocess.run(
        [*command, str(tmp_path / "site")], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=200,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("opening.open_sender", "receiver.WeightReceiver.receive", "doctor.Check"):
        assert f'id="weightwire.{name}"' in reference
    assert 'class="mermaid"' in (tmp_path / "site" / "concepts" / "index.html").read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_the_readme_trainer_feeds_the_readme_receiver(tmp_path):
    trainer, receiver = (  # all there are
        block.replace("/tmp/run42", str(tmp_path / "run42")) for block in blocks("README.md")
    )
    assert len(trainer.splitlines()) <= 16
    assert len(receiver.splitlines()) <= 10
    sent = subprocess.run(
        [sys.executable, "-c", trainer], capture_output=True, text=True, check=True
    )
    assert sent.stdout.count("'announce'") == 3
    got = subprocess.run(
        [sys.executable, "-c", receiver], capture_output=True, text=True, check=True
    )
    assert got.stdout.strip() == "3"


def test_every_link_in_the_docs_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
