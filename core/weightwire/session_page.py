"""A session as one self-contained page: the phases of its last versions, side by side.

Everything in it comes from records that others wrote: it is escaped, and the page runs
no script and loads nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping

from weightwire._version import __version__
from weightwire.inspection import AnswerView, MemberView, SessionView, VersionView
from weightwire.report import PHASES
from weightwire.units import human_bytes, human_seconds, rate

__all__ = ["session_page"]

_MOST_BARS = 24
"""Receivers of a version that are drawn; the others are counted."""
_WIDTH, _LEFT, _HEIGHT, _GAP = 1000.0, 190.0, 18.0, 4.0
_COLOURS = {
    "offer": "#94a3b8",
    "ready": "#64748b",
    "stage": "#d97706",
    "announce": "#f59e0b",
    "wait": "#cbd5e1",
    "fetch": "#0f766e",
    "replay": "#2dd4bf",
    "finalize": "#5b8def",
    "verify": "#a855a0",
    "commit": "#475569",
}


def session_page(view: SessionView) -> str:
    """The page's HTML, in UTF-8."""
    url = html.escape(view.url)
    body = [
        f"<header><p class=kicker>weightwire session</p><h1>{url}</h1>",
        f"<p class=lead>{_lead(view)}</p></header>",
        _members(view),
        f"<section><h2>Phases of the last {len(view.versions)} versions</h2>",
        "<p class=note>Seconds of rank 0 of each side.</p>",
        _legend(),
        *_pictures(view),
        "</section>",
        f"<footer>weightwire {html.escape(__version__)}, from the session's records.</footer>",
    ]
    return _PAGE.format(title=url, style=_STYLE, body="\n".join(body))


def _lead(view: SessionView) -> str:
    alive = sum(member.alive for member in view.receivers)
    sender = view.sender
    if sender is None:
        return f"no sender yet; {alive} live receivers"
    state = "live" if sender.alive else "gone"
    return html.escape(
        f"sender #{sender.incarnation} on {sender.host} ({sender.backend}) is {state}; "
        f"{alive} live receivers"
    )


def _members(view: SessionView) -> str:
    rows = "".join(_member(member) for member in view.receivers)
    head = "".join(
        f"<th>{name}" for name in ("receiver", "process", "state", "serves", "behind", "error")
    )
    return f"<section><h2>Receivers</h2><table><tr>{head}</tr>{rows}</table></section>"


def _member(member: MemberView) -> str:
    behind = f"{member.behind} ({human_seconds(member.lag_s)})" if member.behind else ""
    cells = (
        member.member_id,
        f"{member.pid}@{member.host}",
        member.state if member.alive else "gone",
        "" if member.serving is None else str(member.serving),
        behind,
        member.error,
    )
    return "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells) + "</tr>"


def _legend() -> str:
    return (
        "<p class=legend>"
        + "".join(
            f'<span><i style="background:{_COLOURS[phase]}"></i>{phase}</span>' for phase in PHASES
        )
        + "</p>"
    )


def _pictures(view: SessionView) -> Iterator[str]:
    longest = max((_total(phases) for v in view.versions for phases in _sides(v)), default=0.0)
    for version in view.versions:
        yield _picture(version, longest or 1.0)


def _sides(version: VersionView) -> Iterator[Mapping[str, float]]:
    yield version.phases
    for answer in version.answers:
        yield answer.phases


def _total(phases: Mapping[str, float]) -> float:
    total = sum(phases.values())
    return total if math.isfinite(total) else 0.0


def _picture(version: VersionView, longest: float) -> str:
    shown = version.answers[:_MOST_BARS]
    height = (1 + len(shown)) * (_HEIGHT + _GAP)
    bars = [_bar(0, "sender", version.phases, longest, "")]
    bars += [
        _bar(row, answer.receiver_id, answer.phases, longest, _note(answer))
        for row, answer in enumerate(shown, 1)
    ]
    left = len(version.answers) - len(shown)
    more = f"<p class=note>and {left} more receivers</p>" if left else ""
    error = f"<p class=bad>{html.escape(version.error)}</p>" if version.error else ""
    return (
        f"<h3>{html.escape(_title(version))}</h3>{error}"
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img">{"".join(bars)}</svg>{more}'
    )


def _title(version: VersionView) -> str:
    attempt = f", attempt {version.attempt}" if version.attempt > 1 else ""
    title = f"version {version.version}{attempt} (#{version.incarnation}): {version.state}"
    title += f", {human_bytes(version.nbytes)}"
    if version.seconds:
        speed = rate(version.nbytes, version.seconds)
        title += f" in {human_seconds(version.seconds)}, {speed:.2f} GB/s"
    return title


def _note(answer: AnswerView) -> str:
    if answer.error:
        return answer.error.partition("\n")[0]
    if answer.mismatch:
        return f"holds other bits than its peers: {answer.bits}"
    return f"in {answer.phase}" if answer.phase else ""


def _bar(row: int, name: str, phases: Mapping[str, float], longest: float, note: str) -> str:
    y = row * (_HEIGHT + _GAP)
    middle = y + _HEIGHT / 2
    parts = [f'<text x="0" y="{middle:.1f}" class="name">{html.escape(name[:28])}</text>']
    x, scale = _LEFT, (_WIDTH - _LEFT) / longest
    for phase in PHASES:
        seconds = phases.get(phase, 0.0)
        width = seconds * scale
        if not math.isfinite(width) or width <= 0:
            continue
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_HEIGHT:g}" '
            f'fill="{_COLOURS[phase]}"><title>{phase} {html.escape(human_seconds(seconds))}'
            "</title></rect>"
        )
        x += width
    if note:
        parts.append(
            f'<text x="{_LEFT + 6:g}" y="{middle:.1f}" class="bad">{html.escape(note[:120])}</text>'
        )
    return "".join(parts)


_STYLE = """
:root{--ink:#16211f;--dim:#5d6b68;--line:#dfe5e3;--paper:#fbfcfb}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:48px 28px 64px}
.kicker{margin:0;color:#0f766e;font-weight:600;letter-spacing:.04em}
h1{font-size:28px;line-height:1.2;margin:.15em 0 .3em;overflow-wrap:anywhere}
.lead{font-size:18px;color:var(--dim);margin:0}h2{font-size:21px;margin:0 0 4px}
h3{font-size:15px;margin:26px 0 6px}section{margin-top:40px}.note{color:var(--dim);margin:0 0 10px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--dim);font-size:12px;text-align:left;padding:4px 10px 4px 0}
td{border-top:1px solid var(--line);padding:5px 10px 5px 0;overflow-wrap:anywhere}
svg{display:block;width:100%}svg text{font-size:12px;dominant-baseline:middle;fill:var(--ink)}
svg text.bad{fill:#c2410c;
paint-order:stroke;stroke:var(--paper);stroke-width:4px}
p.bad{color:#c2410c;margin:0 0 6px;white-space:pre-wrap}
.legend span{display:inline-block;margin-right:16px;font-size:13px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
footer{margin-top:48px;border-top:1px solid var(--line);padding-top:14px;
color:var(--dim);font-size:13px}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} · weightwire inspect</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""
