"""The matrix as one self-contained page."""

from __future__ import annotations

import platform
import time
from html import escape

import torch

from weightwire._version import __version__
from weightwire_conformance.matrix import Matrix
from weightwire_conformance.outcomes import Outcome, Result
from weightwire_conformance.reports.marks import MARKS
from weightwire_conformance.scenarios import THEMES

__all__ = ["html_page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --paper: #ffffff;
  --band: #f4f6f9; --line: #e3e7ee; --passed: #12805c; --FAILED: #c4320a;
  --unsupported: #2f6feb; --xfail: #a15c07; --unavailable: #7a5af8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --paper: #12161d;
  --band: #1a202a; --line: #2a3240; --passed: #4cc38a; --FAILED: #ff7a59;
  --unsupported: #7aa7ff; --xfail: #f0b35a; --unavailable: #b7a5ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2.5rem 1.5rem 4rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
.when { color: var(--dim); margin: 0 0 1.75rem; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin-bottom: 1.5rem; }
.card { border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem;
  min-width: 15rem; flex: 1; }
.card b { font-size: 1.05rem; }
.card .verdict { float: right; font-weight: 600; }
.bar { display: flex; height: .45rem; border-radius: .3rem; overflow: hidden; margin: .6rem 0 .5rem;
  background: var(--line); }
.card small { color: var(--dim); }
.filter { margin-bottom: 1rem; display: flex; gap: 1rem; flex-wrap: wrap; align-items: center; }
.filter input[type=search] { flex: 1; min-width: 12rem; padding: .45rem .7rem; color: inherit;
  border: 1px solid var(--line); border-radius: .4rem; background: var(--paper); font: inherit; }
table { border-collapse: collapse; width: 100%; }
thead th { position: sticky; top: 0; background: var(--paper); z-index: 1; }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr.theme th { background: var(--band); font-size: .82rem; letter-spacing: .02em; }
td.name { font-family: ui-monospace, monospace; font-size: .84rem; overflow-wrap: anywhere; }
td.cell { white-space: nowrap; }
.mark { font-weight: 600; }
.seconds { color: var(--dim); font-size: .8rem; margin-left: .35rem; }
details summary { cursor: pointer; }
details pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .78rem; margin: .4rem 0 0;
  max-width: 34rem; color: var(--dim); }
.passed { color: var(--passed); } .FAILED { color: var(--FAILED); }
.unsupported { color: var(--unsupported); } .xfail { color: var(--xfail); }
.unavailable { color: var(--unavailable); }
.bar .passed { background: var(--passed); } .bar .FAILED { background: var(--FAILED); }
.bar .unsupported { background: var(--unsupported); } .bar .xfail { background: var(--xfail); }
.bar .unavailable { background: var(--unavailable); }
footer { color: var(--dim); margin-top: 2rem; font-size: .85rem; }
"""

_SCRIPT = """
const text = document.querySelector('#text'), odd = document.querySelector('#odd');
function show() {
  for (const row of document.querySelectorAll('tr.scenario')) {
    const fits = row.dataset.name.includes(text.value.trim().toLowerCase());
    row.hidden = !fits || (odd.checked && row.dataset.all === 'passed');
  }
}
text.addEventListener('input', show); odd.addEventListener('input', show);
"""

_MEANINGS = (
    ("passed", "it proved what it is named for"),
    ("FAILED", "it didn't"),
    ("unsupported", "the capability isn't declared, and asking for it was refused"),
    ("xfail", "it fails for somebody else's fault, reported there"),
    ("unavailable", "the backend can't run on this machine; not counted as passed"),
)


def html_page(matrix: Matrix) -> str:
    """The page: a card for each backend, the matrix, reasons on demand."""
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    machine = (
        f"weightwire {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{platform.system()} {platform.machine()}"
    )
    meanings = " · ".join(
        f'<span class="{name}">{name}</span>: {escape(meaning)}' for name, meaning in _MEANINGS
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>weightwire conformance: {escape(", ".join(matrix.backends))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>weightwire conformance</h1>
<p class="when">{escape(when)} · {escape(machine)}</p>
<div class="cards">{"".join(_card(matrix, backend) for backend in matrix.backends)}</div>
<div class="filter">
<input id="text" type="search" placeholder="Filter scenarios" aria-label="Filter scenarios">
<label><input id="odd" type="checkbox"> only what isn't all passed</label>
</div>
<table>
<thead><tr><th>scenario</th>{"".join(f"<th>{escape(b)}</th>" for b in matrix.backends)}</tr></thead>
<tbody>{"".join(_theme(matrix, theme) for theme in matrix.themes)}</tbody>
</table>
<footer>{meanings}</footer>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _card(matrix: Matrix, backend: str) -> str:
    counts = matrix.counts(backend)
    total = sum(counts.values())
    bar = "".join(
        f'<span class="{outcome.value}" style="width:{100 * number / total:.2f}%"></span>'
        for outcome, number in counts.items()
    )
    small = " · ".join(f"{number} {outcome.value}" for outcome, number in counts.items())
    if Outcome.FAILED in counts:
        verdict, style = "not conformant", "FAILED"
    elif Outcome.PASSED not in counts:
        verdict, style = "not run", "unavailable"
    else:
        verdict, style = "conformant", "passed"
    flow = matrix.capabilities.get(backend, {}).get("flow", "?")
    seconds = sum(result.seconds for result in matrix.results if result.backend == backend)
    return (
        f'<div class="card"><span class="verdict {style}">{verdict}</span><b>{escape(backend)}</b>'
        f'<div class="bar">{bar}</div><small>{escape(small)}<br>flow {escape(str(flow))}'
        f" · {seconds:.0f} s</small></div>"
    )


def _theme(matrix: Matrix, theme: str) -> str:
    span = len(matrix.backends) + 1
    head = f'<tr class="theme"><th colspan="{span}">{escape(THEMES[theme])}</th></tr>'
    return head + "".join(_scenario(matrix, scenario) for scenario in matrix.scenarios(theme))


def _scenario(matrix: Matrix, scenario: str) -> str:
    results = [matrix.get(scenario, backend) for backend in matrix.backends]
    every = {result.outcome.value for result in results if result is not None}
    all_of = "passed" if every == {"passed"} else "mixed"
    cells = "".join(_cell(result) for result in results)
    return (
        f'<tr class="scenario" data-name="{escape(scenario.lower())}" data-all="{all_of}">'
        f'<td class="name">{escape(scenario)}</td>{cells}</tr>'
    )


def _cell(result: Result | None) -> str:
    if result is None:
        return '<td class="cell"></td>'
    mark = (
        f'<span class="mark {result.outcome.value}">{escape(MARKS[result.outcome])}</span>'
        f'<span class="seconds">{result.seconds:.1f} s</span>'
    )
    if not result.reason:
        return f'<td class="cell">{mark}</td>'
    text = result.reason
    if result.outcome is Outcome.FAILED and result.detail and result.detail != text:
        text = f"{text}\n\n{result.detail}"
    return (
        f'<td class="cell"><details><summary>{mark}</summary><pre>{escape(text)}</pre>'
        "</details></td>"
    )
