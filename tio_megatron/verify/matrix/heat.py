"""The heat map of a table: for the terminal, as a PNG, and as a page that holds everything in one file."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Sequence

from rich.table import Table as Rows

from tio_megatron.verify.matrix.run import Cell

_LOWEST, _HIGHEST = -8.0, 1.0
"""Powers of ten of the largest |logdiff| between which the colours run."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .3rem .8rem; text-align: right; border: 2px solid #fff }
th { text-align: left; font-weight: 600 } td.cell { cursor: pointer; min-width: 6rem } td.cell.chosen { outline: 3px solid #222 }
code { background: #f3f3f3; padding: .1rem .3rem } img { max-width: 100% } #detail { min-height: 9rem }
"""

_SCRIPT = """
const cells = JSON.parse(document.getElementById('data').textContent);
function show(index) {
  document.querySelectorAll('td.cell').forEach(cell => cell.classList.toggle('chosen', Number(cell.dataset.index) === index));
  const cell = cells[index], box = document.getElementById('detail');
  box.replaceChildren();
  const title = document.createElement('h2'); title.textContent = cell.trainer + ' against ' + cell.rollout; box.append(title);
  const numbers = [['tokens', cell.tokens], ['that differ', cell.nonzero], ['max |logdiff|', cell.max_abs], ['mean', cell.mean_abs], ['KL (k3)', cell.k3]];
  for (const [name, value] of numbers) {
    const line = document.createElement('div'); line.textContent = name + ': ' + value; box.append(line);
  }
  const again = document.createElement('p'), code = document.createElement('code');
  code.textContent = cell.command; again.append('again: ', code); box.append(again);
}
document.querySelectorAll('td.cell').forEach(cell => cell.addEventListener('click', () => show(Number(cell.dataset.index))));
show(0);
"""


def summary(cells: Sequence[Cell]) -> str:
    """The last line."""
    same = sum(cell.found.status == 0 for cell in cells)
    largest = max((cell.found.max_abs for cell in cells), default=0.0)
    tokens = sum(cell.found.tokens for cell in cells)
    return f"logdiff 0 in {same} of {len(cells)} pairs ({tokens} tokens)" + ("" if same == len(cells) else f"; max {largest:.3g}")


def terminal(cells: Sequence[Cell]) -> Rows:
    """Trainers down, rollouts across; a pair's largest |logdiff|."""
    trainers, rollouts = _axes(cells)
    rows = Rows("max |logdiff|", *rollouts)
    for trainer in trainers:
        mine = [cell for cell in cells if str(cell.trainer) == trainer]
        rows.add_row(trainer, *(f"[{'green' if cell.found.status == 0 else 'red'}]{_text(cell)}[/]" for cell in mine))
    return rows


def draw(cells: Sequence[Cell]) -> bytes:
    """A PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trainers, rollouts = _axes(cells)
    shares = [[_share(cell) for cell in cells if str(cell.trainer) == trainer] for trainer in trainers]
    figure, axis = pyplot.subplots(figsize=(3 + 1.5 * len(rollouts), 1.6 + 0.5 * len(trainers)), layout="constrained")
    axis.imshow(shares, cmap="RdYlGn_r", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(rollouts)), rollouts, rotation=25, ha="right", fontsize="small")
    axis.set_yticks(range(len(trainers)), trainers, fontsize="small")
    for index, cell in enumerate(cells):
        axis.text(index % len(rollouts), index // len(rollouts), _text(cell), ha="center", va="center", fontsize="small")
    axis.set_title(f"max |logdiff|: {summary(cells)}", fontsize="medium")
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=120)
    pyplot.close(figure)
    return held.getvalue()


def page(cells: Sequence[Cell]) -> str:
    """An HTML page without any outside file; a click on a pair shows its numbers and the command that compares it again."""
    trainers, rollouts = _axes(cells)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *rollouts))
    body = []
    for row, trainer in enumerate(trainers):
        line = [f"<th>{html.escape(trainer)}</th>"]
        for column in range(len(rollouts)):
            index = row * len(rollouts) + column
            line.append(f"<td class='cell' data-index='{index}' style='background:{_colour(cells[index])}'>{html.escape(_text(cells[index]))}</td>")
        body.append(f"<tr>{''.join(line)}</tr>")
    data = json.dumps([cell.to_dict() for cell in cells]).replace("<", "\\u003c")
    picture = base64.b64encode(draw(cells)).decode()
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>tio matrix</title><style>{_STYLE}</style></head><body>"
        f"<h1>Trainers against rollouts</h1><p id='summary'>{html.escape(summary(cells))}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table><div id='detail'></div>"
        f"<details><summary>as a picture</summary><img alt='the same table' src='data:image/png;base64,{picture}'></details>"
        f"<script type='application/json' id='data'>{data}</script><script>{_SCRIPT}</script></body></html>"
    )


def _axes(cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    return [*dict.fromkeys(str(cell.trainer) for cell in cells)], [*dict.fromkeys(str(cell.rollout) for cell in cells)]


def _text(cell: Cell) -> str:
    return "0" if cell.found.status == 0 else f"{cell.found.max_abs:.2g}" if cell.found.max_abs else "sign of 0"


def _share(cell: Cell) -> float:
    """0 equal, to 1 as far apart as the colours go."""
    if cell.found.status == 0:
        return 0.0
    power = math.log10(max(cell.found.max_abs, 10**_LOWEST))
    return 0.3 + 0.7 * min(1.0, max(0.0, (power - _LOWEST) / (_HIGHEST - _LOWEST)))


def _colour(cell: Cell) -> str:
    share = _share(cell)
    return "#bfe8c5" if share == 0 else f"hsl({50 - 50 * share:.0f} 90% {78 - 18 * share:.0f}%)"
