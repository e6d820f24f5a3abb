"""The selection audit as a picture: SVG written by hand, since a drawing library is a heavy guest.

One line per layer and KV head. Left: attention mass in the chosen blocks (dot) between what the
newest blocks would hold (open circle) and the most that any choice could (bar). Right: how often
the blocks at a depth of the text were chosen, of the times they could have been.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

_ROW, _TOP, _LABEL, _MASS, _GAP, _CELL = 16, 64, 96, 320, 40, 26
_STYLE = """
  svg { background: #fff; font: 11px sans-serif; fill: #222 }
  .grid { stroke: #ddd } .best { stroke: #888; stroke-width: 3 } .span { stroke: #bbb }
  .chosen { fill: #0a6b50 } .window { fill: #fff; stroke: #b3541e; stroke-width: 1.5 }
  .head { font-size: 13px; font-weight: bold }
  .cell { fill: #0a6b50 } .frame { fill: none; stroke: #ddd }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181a; fill: #ddd }
    .grid, .frame { stroke: #3a3d40 } .chosen, .cell { fill: #3ec79b } .window { fill: #16181a }
  }
"""


def selection_svg(found: Mapping[str, Any]) -> str:
    """The picture of an audit.

    Args:
        found: :meth:`minuet.evals.selection.Audit.as_json`.
    """
    heads = found["heads"]
    depths = len(heads[0]["chosen_by_depth"])
    width = _LABEL + _MASS + _GAP + depths * _CELL + 24
    height = _TOP + len(heads) * _ROW + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        f"<style>{_STYLE}</style>",
        f"<title>{escape(_title(found))}</title>",
        *_axes(found, len(heads), depths),
    ]
    for number, head in enumerate(heads):
        lines += _line(head, _TOP + number * _ROW + _ROW // 2)
    return "\n".join([*lines, "</svg>", ""])


def _title(found: Mapping[str, Any]) -> str:
    return (
        f"{found['model']}: {found['top_blocks']} blocks of {found['block_tokens']} tokens chosen, "
        f"{found['texts']} texts, {found['tokens']:,} tokens"
    )


def _axes(found: Mapping[str, Any], rows: int, depths: int) -> Iterator[str]:
    bottom = _TOP + rows * _ROW
    yield _text(8, 18, _title(found), "head")
    yield _text(_LABEL, 38, "attention mass: dot chosen, circle newest blocks, bar best possible")
    for tick in range(5):
        x = _LABEL + tick * _MASS // 4
        yield f'<line class="grid" x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}"/>'
        yield _text(x, bottom + 16, f"{tick / 4:.2f}", anchor="middle")
    left = _LABEL + _MASS + _GAP
    yield _text(left, 38, "chosen at depth, of the times it could be")
    for tick in range(0, depths + 1, 5):
        x = left + tick * _CELL
        yield _text(x, bottom + 16, f"{tick / depths:.1f}", anchor="middle")


def _line(head: Mapping[str, Any], y: int) -> Iterator[str]:
    yield _text(8, y + 4, f"layer {head['layer']} head {head['kv_head']}")
    chosen, best, window = (
        _LABEL + head[name] * _MASS for name in ("recall_mean", "best_mean", "window_mean")
    )
    yield f'<line class="span" x1="{window:.1f}" y1="{y}" x2="{best:.1f}" y2="{y}"/>'
    yield f'<line class="best" x1="{best:.1f}" y1="{y - 5}" x2="{best:.1f}" y2="{y + 5}"/>'
    yield f'<circle class="window" cx="{window:.1f}" cy="{y}" r="3.5"/>'
    yield f'<circle class="chosen" cx="{chosen:.1f}" cy="{y}" r="4"/>'
    pairs = zip(head["chosen_by_depth"], head["reachable_by_depth"], strict=True)
    for number, (taken, reachable) in enumerate(pairs):
        x, top = _LABEL + _MASS + _GAP + number * _CELL, y - _ROW // 2 + 1
        box = f'x="{x}" y="{top}" width="{_CELL - 2}" height="{_ROW - 2}"'
        share = taken / reachable if reachable else 0.0
        shown = f'fill-opacity="{share:.3f}"'
        yield f'<rect class="cell" {box} {shown}><title>{share:.3f}</title></rect>'
        yield f'<rect class="frame" {box}/>'


def _text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}" text-anchor="{anchor}">{escape(said)}</text>'
