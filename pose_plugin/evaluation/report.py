"""Several models side by side: tables for the terminal and for Markdown, JSON, CSV, and the pictures."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.best import ERRORS, FEWEST, best_by_measure, sentence
from pose_plugin.evaluation.measures.passkey import PasskeyResult
from pose_plugin.evaluation.measures.perplexity import PerplexityResult
from pose_plugin.evaluation.results import Report
from pose_plugin.utils.files import write_whole

SHORT_LOSS = 5
"""Per cent of perplexity at the short window that a model may lose before the guard says so."""
ALIKE = (
    f"Best by measure: = is equal, ≈ not told apart from the best (on the same prompts or windows the mean difference "
    f"is below {ERRORS} of its standard errors, or there are fewer than {FEWEST})."
)
Table = tuple[list[str], list[list[str]]]
"""Header and rows, the first column a name."""


def tables(report: Report) -> dict[str, Table]:
    """The tables that there are results for, by title."""
    found: dict[str, Table] = {}
    lengths = sorted({n for m in report.models if m.passkey for n in m.passkey.lengths})
    if lengths:
        rows = [
            [m.name, *(_share(m.passkey, n) for n in lengths), str(m.passkey.k_max())]
            for m in report.models
            if m.passkey
        ]
        found["Passkey accuracy ± standard error"] = (["model", *map(str, lengths), "k_max"], rows)
    lengths = sorted({n for m in report.models if m.perplexity for n in m.perplexity.by_length})
    if lengths:
        rows = [[m.name, *(_perplexity(m.perplexity, n) for n in lengths)] for m in report.models if m.perplexity]
        found["Sliding-window perplexity"] = (["model", *map(str, lengths)], rows)
    return {**found, **_further_tables(report)}


def _further_tables(report: Report) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for name, title in (("needle", "Needle, {kind}"), ("topics", "Topics, {kind}")):
        found = {m.name: getattr(m, name) for m in report.models if getattr(m, name)}
        for kind in dict.fromkeys(kind for result in found.values() for kind in result.kinds):
            values = {who: r.by_length(kind) for who, r in found.items() if kind in r.kinds}
            tables[f"{title.format(kind=kind)}: mean score"] = _by_length(values, "{:.2f}")
    longppl = {m.name: {n: w.longppl for n, w in m.longppl.by_length.items()} for m in report.models if m.longppl}
    if longppl:
        tables["LongPPL"] = _by_length(longppl, "{:.3f}")
    gap = {m.name: {n: probe.loss for n, probe in m.gap.by_length.items()} for m in report.models if m.gap}
    if gap:
        tables["Gap probe: loss by farthest position"] = _by_length(gap, "{:.3f}")
    tables |= _guard(report)
    harness = {m.name: m.harness for m in report.models if m.harness}
    if harness:
        names = list(dict.fromkeys(name for result in harness.values() for name in result.scores))
        rows = [[who, *(f"{r.scores[n]:.3f}" if n in r.scores else "-" for n in names)] for who, r in harness.items()]
        tables["lm-eval"] = (["model", *names], rows)
    found_best = best_by_measure(report)
    if found_best:
        rows = [
            [b.measure, " ≈ ".join([" = ".join(b.names), *b.close]),
             *(f"{b.values[m.name]:.3g}" if m.name in b.values else "-" for m in report.models)]
            for b in found_best
        ]  # fmt: skip
        tables["Best by measure"] = (["measure", "best", *(m.name for m in report.models)], rows)
    return tables


def _guard(report: Report) -> dict[str, Table]:
    measured = [(m.name, m.short) for m in report.models if m.short]
    if not measured:
        return {}
    tokens = {m.name: m.tokens for m in report.models}
    leader, (first,) = measured[0][0], measured[0][1].by_length.values()
    rows = []
    for name, result in measured:
        (window,) = result.by_length.values()
        change = 100 * (window.perplexity / first.perplexity - 1)
        if name == leader or not math.isfinite(first.perplexity):
            verdict = "-"
        elif tokens[name] != tokens[leader]:
            verdict = "other tokens"
        elif not math.isfinite(window.perplexity):
            verdict = "lost"
        else:
            verdict = f"worse by more than {SHORT_LOSS} %" if change > SHORT_LOSS else "kept"
        shown = f"{change:+.1f} %" if math.isfinite(change) and math.isfinite(first.perplexity) else "-"
        rows.append([name, _perplexity(result, window.length), shown, verdict])
    length = next(iter(measured[0][1].by_length))
    return {
        f"Short-context guard: perplexity at {length}": (
            ["model", str(length), f"against {leader}", "skill"],
            rows,
        )
    }


def best(report: Report) -> str | None:
    """A sentence that names the best model, None where there is nothing to compare."""
    return sentence(best_by_measure(report))


def definitions(report: Report) -> list[str]:
    """What was measured, each sentence once."""
    found = [r.definition for m in report.models for r in m.results().values()]
    return list(dict.fromkeys(found))


def text(report: Report) -> str:
    """The tables with their definitions and notes, for the terminal."""
    parts = [f"{title}\n{plain_table(*table)}" for title, table in tables(report).items()]
    return "\n\n".join(["\n\n".join(parts), *_named(report), *definitions(report), *_notes(report)])


def markdown(report: Report) -> str:
    """The same as Markdown, as for a model card."""
    parts = [f"**{title}**\n\n{markdown_table(*table)}" for title, table in tables(report).items()]
    return "\n\n".join([*parts, *_named(report), *_windows(report), *definitions(report), *_notes(report)]) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """Everything, down to the single trial."""
    return {
        "best": best(report),
        "train_length": report.train_length,
        "target_length": report.target_length,
        "models": [
            {
                "name": m.name,
                "notes": m.notes,
                **m.facts,
                **{name: result.to_dict() for name, result in m.results().items()},
            }
            for m in report.models
        ],
    }


def to_json(report: Report) -> str:
    """`to_dict` as JSON; what is not finite becomes null, which every reader of JSON understands."""
    return json.dumps(_finite(to_dict(report)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_files(report: Report) -> dict[str, str]:
    """File name to content: one line a model and length (and depth, and position range)."""
    files: dict[str, list[list[Any]]] = {
        "passkey.csv": [["model", "length", "accuracy", "standard_error", "correct", "trials"]],
        "passkey_depth.csv": [["model", "length", "depth", "accuracy", "correct", "trials"]],
        "perplexity.csv": [["model", "length", "perplexity", "loss", "tokens", "windows", "stride"]],
        "perplexity_position.csv": [["model", "length", "from", "to", "perplexity", "loss", "tokens"]],
        "needle.csv": [["model", "kind", "length", "depth", "score"]],
        "topics.csv": [["model", "kind", "length", "depth", "score"]],
        "longppl.csv": [["model", "length", "longppl", "loss", "key_tokens", "plain_loss", "plain_tokens"]],
        "gap.csv": [["model", "length", "gap", "loss", "tokens"]],
        "short.csv": [["model", "length", "perplexity", "loss", "tokens"]],
        "harness.csv": [["model", "task", "score"]],
    }
    for m in report.models:
        if m.passkey:
            for n, a in m.passkey.by_length.items():
                files["passkey.csv"].append([m.name, n, a.value, a.standard_error, a.correct, a.trials])
            for (n, depth), a in m.passkey.by_depth.items():
                files["passkey_depth.csv"].append([m.name, n, depth, a.value, a.correct, a.trials])
        for n, w in m.perplexity.by_length.items() if m.perplexity else ():
            row = [m.name, n, w.perplexity, w.loss, w.tokens, w.windows, w.stride]
            files["perplexity.csv"].append(row)
            for b in w.buckets:
                row = [m.name, n, b.start, b.end, b.perplexity, b.loss, b.tokens]
                files["perplexity_position.csv"].append(row)
        for name in ("needle", "topics"):
            result = getattr(m, name)
            for kind in result.kinds if result else ():
                for (n, depth), value in result.cells(kind).items():
                    files[f"{name}.csv"].append([m.name, kind, n, depth, value])
        for n, k in m.longppl.by_length.items() if m.longppl else ():
            files["longppl.csv"].append([m.name, n, k.longppl, k.loss, k.tokens, k.plain_loss, k.plain_tokens])
        for n, p in m.gap.by_length.items() if m.gap else ():
            files["gap.csv"].append([m.name, n, p.gap, p.loss, p.count])
        for n, w in m.short.by_length.items() if m.short else ():
            files["short.csv"].append([m.name, n, w.perplexity, w.loss, w.tokens])
        for task, value in m.harness.scores.items() if m.harness else ():
            files["harness.csv"].append([m.name, task, value])
    return {name: _csv(rows) for name, rows in files.items() if len(rows) > 1}


def write(report: Report, folder: str | Path, pictures: Sequence[Path] = ()) -> list[Path]:
    """Write results.json, report.md, report.html and the CSV files.

    Args:
        report: what was measured.
        folder: made if it does not exist.
        pictures: PNG files that `figures.draw` has written; report.html contains them.

    Returns:
        the files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"results.json": to_json(report), "report.md": markdown(report), **csv_files(report)}
    files["report.html"] = html_page(report, pictures)
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def _named(report: Report) -> list[str]:
    named = best(report)
    return [ALIKE, named] if named else []


def _windows(report: Report) -> list[str]:
    known = {"Trained window": report.train_length, "target window": report.target_length}
    text = ", ".join(f"{name}: {value} tokens" for name, value in known.items() if value)
    return [text + "."] if text else []


def _notes(report: Report) -> list[str]:
    return [f"Note ({m.name}): {note}" for m in report.models for note in m.notes]


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to one width each, the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.ljust if i == 0 else cell.rjust for i, cell in enumerate(cells))
        padded = [first(widths[0]), *(pad(w) for pad, w in zip(others, widths[1:], strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("─" * width for width in widths), *map(line, rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def html_page(report: Report, pictures: Sequence[Path]) -> str:
    """One file with tables and pictures inside, to send on."""
    parts = []
    for title, (header, rows) in tables(report).items():
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>")
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<p><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></p>')
    text = [*_named(report), *_windows(report), *definitions(report), *_notes(report)]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in text]
    style = (
        "body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
        "table{border-collapse:collapse}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}"
        "td:first-child,th:first-child{text-align:left}img{max-width:100%}h2{font-size:1.1em}"
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Evaluation</title><style>{style}</style>\n'
        f"<h1>Evaluation</h1>\n{body}\n</html>\n"
    )


def _by_length(values: dict[str, dict[int, float]], form: str) -> Table:
    lengths = sorted({n for row in values.values() for n in row})
    rows = [[who, *(form.format(row[n]) if n in row else "-" for n in lengths)] for who, row in values.items()]
    return ["model", *map(str, lengths)], rows


def _share(result: PasskeyResult, length: int) -> str:
    accuracy = result.by_length.get(length)
    return "-" if accuracy is None else f"{accuracy.value:.2f} ±{accuracy.standard_error:.2f}"


def _perplexity(result: PerplexityResult, length: int) -> str:
    window = result.by_length.get(length)
    if window is None:
        return "-"
    # As in the papers: three digits, and beyond a thousand only that it is.
    return f"{window.perplexity:.2f}" if window.perplexity < 1000 else f"{window.perplexity:.1e}"


def _csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
