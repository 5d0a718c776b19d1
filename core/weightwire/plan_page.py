"""A plan as one self-contained page: who reads from whom, how much, and what it will cost."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from weightwire._version import __version__
from weightwire.planning import Plan, RankPlan
from weightwire.units import human_bytes, human_seconds

__all__ = ["page"]

LINK = 50e9
"""Bytes a second into one rank: a 400 Gbit/s adapter."""
DESCRIPTOR = 1e-6
"""Seconds that a transport spends on a descriptor."""
MEMORY = 1e12
"""Bytes a second of local copies, each read and written once."""
OPERATION = 5e-6
"""Seconds to start a replayed operation."""

_MOST_ROWS = 64


@dataclass(frozen=True)
class _Cost:
    wire: float
    descriptors: float
    copies: float
    operations: float

    @property
    def total(self) -> float:
        return self.wire + self.descriptors + self.copies + self.operations


def _cost(nbytes: int, descriptors: int, replayed: int) -> _Cost:
    return _Cost(nbytes / LINK, descriptors * DESCRIPTOR, 2 * nbytes / MEMORY, replayed * OPERATION)


def page(plan: Plan) -> str:
    """The page's HTML, in UTF-8; it loads nothing."""
    name = html.escape(plan.request.model.name or str(plan.request.model))
    trainer, inference = plan.request.trainer, plan.request.inference
    slowest = max(plan.ranks, key=lambda rank: _of(rank).total, default=None)
    total = sum(rank.nbytes for rank in plan.ranks)
    descriptors = sum(rank.descriptors for rank in plan.ranks)
    spread = ", ".join(
        f"{axis} {size}"
        for axis, size in (("TP", inference.tp), ("PP", inference.pp), ("DP", inference.dp))
        if size > 1
    )
    experts = ", experts over all" if inference.is_expert_parallel else ""
    facts = [
        (human_bytes(total), f"read by {len(plan.ranks)} inference ranks together"),
        (f"{descriptors:,}", "descriptors: contiguous runs, merged"),
        (human_bytes(plan.largest_group_bytes), "largest arena: one transfer group"),
        (f"{sum(rank.replayed for rank in plan.ranks):,}", "operations replayed a version"),
        (human_seconds(_of(slowest).total) if slowest else "-", "estimated, slowest rank"),
    ]
    topology = (
        f"{trainer.world_size} trainer ranks (dp {trainer.replicas}, fsdp {trainer.fsdp}, "
        f"ep {trainer.ep}) to {inference.world_size} inference ranks "
        f"({spread or 'one rank'}{experts})"
    )
    footer = (
        f"weightwire {__version__}. Bytes, descriptors and operations are counted; "
        "seconds are an estimate by the rates named above, without overlap."
    )
    body = [
        f"<header><p class=kicker>weightwire plan</p><h1>{name}</h1>",
        f"<p class=lead>{topology}</p></header>",
        "<section class=facts>",
        *(f"<div><b>{value}</b><span>{what}</span></div>" for value, what in facts),
        "</section>",
        _unmatched(plan),
        _matrix(plan),
        _layers(plan),
        _time(plan),
        f"<footer>{footer}</footer>",
    ]
    return _PAGE.format(title=f"{name} · weightwire plan", style=_STYLE, body="\n".join(body))


def _of(rank: RankPlan) -> _Cost:
    return _cost(rank.nbytes, rank.descriptors, rank.replayed)


def _unmatched(plan: Plan) -> str:
    if not plan.unmatched:
        return ""
    names = "".join(f"<li>{html.escape(name)}</li>" for name in plan.unmatched[:100])
    return (
        f"<section class=bad><h2>{len(plan.unmatched)} names don't match</h2><ul>{names}</ul>"
        "</section>"
    )


def _matrix(plan: Plan) -> str:
    """Inference ranks by trainer ranks; many trainer ranks share a column."""
    world = plan.request.trainer.world_size
    columns = min(world, _MOST_ROWS)
    bounds = [i * world // columns for i in range(columns + 1)]
    shown = plan.ranks[:_MOST_ROWS]
    cells: list[list[int]] = []
    for rank in shown:
        row = [0] * columns
        owners = rank.owners
        for i in range(columns):
            row[i] = sum(owners.get(owner, 0) for owner in range(bounds[i], bounds[i + 1]))
        cells.append(row)
    most = max((value for row in cells for value in row), default=0) or 1
    text = columns <= 12
    head = "".join(
        f"<th>{bounds[i]}{'' if bounds[i + 1] - bounds[i] == 1 else '+'}</th>"
        if text or i % 8 == 0
        else "<th></th>"
        for i in range(columns)
    )
    lines = []
    for rank, row in zip(shown, cells, strict=True):
        tds = "".join(
            f'<td style="--v:{(value / most) ** 0.6:.3f}" class="{_shade(value, most)}" '
            f'title="inference rank {rank.rank} reads {human_bytes(value)} from trainer rank '
            f'{bounds[i]}{"" if bounds[i + 1] - bounds[i] == 1 else f" to {bounds[i + 1] - 1}"}">'
            f"{human_bytes(value) if text and value else ''}</td>"
            for i, value in enumerate(row)
        )
        lines.append(f"<tr><th>{rank.rank}</th>{tds}<td class=sum>{human_bytes(rank.nbytes)}</td>")
    more = len(plan.ranks) - len(shown)
    note = f"<p class=note>{more} more inference ranks aren't shown.</p>" if more > 0 else ""
    return (
        "<section><h2>Who reads from whom</h2><p class=note>A row is an inference rank, a column "
        "a trainer rank; the darker, the more bytes. Hover for figures.</p>"
        f"<div class=scroll><table class=matrix><tr><th></th>{head}<th>in all</th></tr>"
        f"{''.join(lines)}</table></div>{note}</section>"
    )


def _shade(value: int, most: int) -> str:
    if not value:
        return ""
    return "on dark" if (value / most) ** 0.6 > 0.5 else "on"


def _layers(plan: Plan) -> str:
    """For each group, what the rank that reads most of it reads."""
    by_group: dict[int, tuple[str, int, int, int]] = {}
    for rank in plan.ranks:
        for group in rank.groups:
            name, nbytes, descriptors, replayed = by_group.get(group.group, (group.name, 0, 0, 0))
            by_group[group.group] = (
                name,
                max(nbytes, group.nbytes),
                max(descriptors, group.descriptors),
                max(replayed, group.replayed),
            )
    most = max((nbytes for _, nbytes, _, _ in by_group.values()), default=0) or 1
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td class=bar><i style='width:{100 * n / most:.2f}%'></i>"
        f"</td><td>{human_bytes(n)}</td><td>{d:,}</td><td>{r:,}</td></tr>"
        for _, (name, n, d, r) in sorted(by_group.items())
    )
    return (
        "<section><h2>Bytes by layer</h2><p class=note>One line a transfer group, in the order in "
        "which they travel: what the rank that reads most of it reads.</p><div class=scroll>"
        "<table class=layers><tr><th>group</th><th></th><th>bytes</th><th>descriptors</th>"
        f"<th>replayed</th></tr>{rows}</table></div></section>"
    )


def _time(plan: Plan) -> str:
    ranks = sorted(plan.ranks, key=lambda rank: -_of(rank).total)[:_MOST_ROWS]
    most = max((_of(rank).total for rank in ranks), default=0.0) or 1.0
    parts = ("wire", "descriptors", "copies", "operations")
    legend = "".join(
        f"<span class={part}>{what}</span>" for part, what in zip(parts, _PARTS, strict=True)
    )
    rows = []
    for rank in ranks:
        cost = _of(rank)
        bars = "".join(
            f"<i class={part} style='width:{100 * getattr(cost, part) / most:.2f}%' "
            f"title='{part}: {human_seconds(getattr(cost, part))}'></i>"
            for part in parts
        )
        rows.append(
            f"<tr><th>rank {rank.rank}</th><td class=bar>{bars}</td>"
            f"<td>{human_seconds(cost.total)}</td></tr>"
        )
    return (
        "<section><h2>Where the time will go</h2><p class=note>An estimate: "
        f"{human_bytes(LINK)}/s into a rank, {human_seconds(DESCRIPTOR)} a descriptor, "
        f"{human_bytes(MEMORY)}/s for local copies, {human_seconds(OPERATION)} an operation.</p>"
        f"<p class=legend>{legend}</p><div class=scroll><table class=layers>{''.join(rows)}</table>"
        f"</div>{_balance(plan.ranks)}</section>"
    )


_PARTS = ("over the wire", "descriptors", "copying into place", "starting operations")


def _balance(ranks: Sequence[RankPlan]) -> str:
    """How evenly trainer ranks serve."""
    served: dict[int, int] = {}
    for rank in ranks:
        for owner, nbytes in rank.owners.items():
            served[owner] = served.get(owner, 0) + nbytes
    if len(served) < 2:
        return ""
    mean = sum(served.values()) / len(served)
    owner = max(served, key=lambda o: served[o])
    return (
        f"<p class=note>{len(served)} trainer ranks serve; trainer rank {owner} serves most: "
        f"{human_bytes(served[owner])}, {served[owner] / mean:.2f} times the mean.</p>"
    )


_STYLE = """
:root{--ink:#16211f;--dim:#5d6b68;--line:#dfe5e3;--paper:#fbfcfb;--hue:170;
--wire:#0f766e;--desc:#d97706;--copy:#5b8def;--op:#a855a0}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:48px 28px 64px}
.kicker{margin:0;color:var(--wire);font-weight:600;letter-spacing:.04em}
h1{font-size:40px;line-height:1.1;margin:.15em 0 .2em;letter-spacing:-.02em;overflow-wrap:anywhere}
.lead{font-size:18px;color:var(--dim);margin:0}h2{font-size:21px;margin:0 0 4px}
section{margin-top:44px}.note{color:var(--dim);margin:0 0 14px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:1px;
background:var(--line);border:1px solid var(--line);border-radius:10px;overflow:hidden}
.facts div{background:#fff;padding:16px 18px}.facts b{display:block;font-size:25px;
letter-spacing:-.01em;font-variant-numeric:tabular-nums}.facts span{color:var(--dim);font-size:13px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--dim);font-size:12px;padding:2px 6px;text-align:left;
white-space:nowrap}
.matrix td{min-width:14px;height:22px;padding:0 5px;border:1px solid var(--paper);font-size:12px;
text-align:center;white-space:nowrap;background:#eef2f1}
.matrix td.on{background:hsl(var(--hue) 55% calc(93% - 63%*var(--v)))}
.matrix td.dark{color:#fff}
.matrix td.sum{background:none;color:var(--ink);text-align:right;padding-left:12px}
.layers{width:100%}.layers td{padding:2px 8px;text-align:right;white-space:nowrap;font-size:13px}
.layers th{width:1%}.layers tr:hover td,.layers tr:hover th{background:#f0f4f3}
.layers td.bar{width:60%;padding:3px 8px;text-align:left}
.bar{white-space:nowrap;line-height:0}
.bar i{display:inline-block;height:14px;background:var(--wire);
border-radius:2px;vertical-align:middle}
.scroll+.note{margin-top:14px}
.legend span{margin-right:20px;font-size:13px}.legend span::before{content:"";display:inline-block;
width:11px;height:11px;border-radius:3px;margin-right:6px;background:var(--wire)}
i.descriptors,.legend .descriptors::before{background:var(--desc)!important}
i.copies,.legend .copies::before{background:var(--copy)!important}
i.operations,.legend .operations::before{background:var(--op)!important}
.bad{border-left:4px solid #c2410c;padding-left:16px}.bad ul{columns:2;font-size:13px}
footer{margin-top:56px;border-top:1px solid var(--line);padding-top:14px;
color:var(--dim);font-size:13px}
@media print{main{max-width:none}}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""
