"""The code in README runs as it is printed."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_the_readme_trainer_feeds_the_readme_receiver(tmp_path):
    trainer, receiver = (
        block.replace("/tmp/run42", str(tmp_path / "run42")) for block in blocks("README.md")[:2]
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
