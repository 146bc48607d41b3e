"""The picture of a logdiff: a PNG, and a page that holds everything in one file."""

from __future__ import annotations

import base64
import html
import io

from tio_megatron.verify.logdiff import Logdiff

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } img { max-width: 100% } .here { background: #ffe9c7 } .verdict { font-size: 1.3rem }
code { background: #f3f3f3; padding: .1rem .3rem }
"""


def draw(found: Logdiff, names: tuple[str, str] = ("A", "B")) -> bytes:
    """A PNG: how large the differences are, and how they go over positions and over sequences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (sizes, positions, sequences) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    figure.suptitle(f"{names[0]} against {names[1]}: {found.verdict}", fontsize="medium")
    labels = ["0" if edge == 0 else f"{edge:.1g}" for edge, _ in found.histogram]
    sizes.bar(range(len(labels)), [count for _, count in found.histogram], color="tab:blue")
    sizes.set_yscale("symlog")
    step = max(1, len(labels) // 8)
    sizes.set_xticks(range(0, len(labels), step), labels[::step], rotation=45, fontsize="small")
    sizes.set(xlabel="|difference| from", ylabel="tokens")
    for axis, rows, label in ((positions, found.by_position, "position"), (sequences, found.by_sequence, "sequence")):
        places = [(first + stop - 1) / 2 for first, stop, *_ in rows]
        axis.plot(places, [mean for *_, mean, _ in rows], ".-", label="mean", markersize=3)
        axis.plot(places, [largest for *_, largest in rows], ".", label="largest", markersize=3, color="tab:red")
        axis.set(xlabel=label, ylabel="|difference|")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110)
    pyplot.close(figure)
    return held.getvalue()


def page(found: Logdiff, names: tuple[str, str] = ("A", "B")) -> str:
    """An HTML page without any outside file."""
    a, b = (html.escape(name) for name in names)
    picture = base64.b64encode(draw(found, names)).decode()
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in numbers(found))
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>logdiff</title><style>{_STYLE}</style></head><body>",
        f"<h1>logdiff</h1><p>A = <code>{a}</code><br>B = <code>{b}</code></p><p class='verdict'>{html.escape(found.verdict)}</p>",
        f"<table>{rows}</table><img alt='differences by size, position and sequence' src='data:image/png;base64,{picture}'>",
    ]
    if found.first:
        parts.append(f"<h2>First token that differs: sequence {found.first.sequence}, position {found.first.position}</h2>")
        parts.append("<table><tr><th>position</th><th>token</th><th>A</th><th>B</th></tr>")
        for at, token, x, y in found.first.context:
            mark = " class='here'" if at == found.first.position else ""
            parts.append(f"<tr{mark}><td>{at}</td><td>{token}</td><td>{_number(x)}</td><td>{_number(y)}</td></tr>")
        parts.append("</table>")
    if found.worst:
        parts.append("<h2>Sequences that differ most</h2><table><tr><th>sequence</th><th>tokens</th><th>mean |difference|</th></tr>")
        parts += [f"<tr><td>{index}</td><td>{count}</td><td>{mean:.4g}</td></tr>" for mean, index, count in found.worst]
        parts.append("</table>")
    return "".join(parts) + "</body></html>\n"


def numbers(found: Logdiff) -> list[tuple[str, str]]:
    """(what, value in words) of every statistic, for tables."""
    quantiles = ", ".join(f"{name} {value:.3g}" for name, value in found.quantiles.items())
    return [
        ("tokens compared", f"{found.tokens} in {found.sequences} sequences"),
        ("tokens that differ", f"{found.nonzero}" + (f" ({100 * found.nonzero / found.tokens:.3g}%)" if found.tokens else "")),
        ("largest, mean |difference|", f"{found.max_abs:.6g}, {found.mean_abs:.6g}"),
        ("quantiles of |difference|", quantiles),
        ("mean of A - B", f"{found.bias:.6g}"),
        ("KL(B, A): k1, k3", f"{found.k1:.6g}, {found.k3:.6g}"),
        ("importance ratio exp(A - B)", f"{found.ratio_min:.6g} to {found.ratio_max:.6g}; {found.extreme} tokens above 2 or below 1/2"),
        ("last third of positions / first third", f"{found.growth:.3g}"),
        *(("note", note) for note in found.notes),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"
