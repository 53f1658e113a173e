"""Several models in one report: tables for the terminal and for Markdown, JSON, CSV and a web page.

Everything is made of the rows of results and of what their measures declare.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.best import best_by_measure, best_sentence
from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.measures import MEASURES
from pose_plugin.evaluation.results import ERRORS, FEWEST, ModelResult, Report, Row
from pose_plugin.utils.files import write_whole

ALIKE = (
    f"Best by measure: = is equal, ≈ is within noise of the best (on the same prompts or windows the mean difference "
    f"is below {ERRORS} of its standard errors, or there are fewer than {FEWEST})."
)
STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}h2{font-size:1.1em}"
)
Table = tuple[list[str], list[list[str]]]
"""Header and rows, the first column a name."""


def tables(report: Report) -> dict[str, Table]:
    """Return a table for each measure and kind that there are results for, by title."""
    found: dict[str, Table] = {}
    for name in report.measures:
        found |= _measured(report, MEASURES[name])
    best = best_by_measure(report)
    if best:
        rows = [
            [b.measure, " ≈ ".join([" = ".join(b.names), *b.close]),
             *(f"{b.values[m.name]:.3g}" if m.name in b.values else "-" for m in report.models)]
            for b in best
        ]  # fmt: skip
        found["Best by measure"] = (["measure", "best", *(m.name for m in report.models)], rows)
    return found


def _measured(report: Report, measure: type[Measure]) -> dict[str, Table]:
    """Return the tables of one measure: a line per model, a column per length."""
    results = {m.name: m.results[measure.name] for m in report.models if measure.name in m.results}
    cells: dict[str, dict[str, dict[str, Row]]] = {}
    for who, result in results.items():
        for kind in result.kinds:
            for row in result.by_length(kind).values():
                title, column = measure.place(row)
                cells.setdefault(title, {}).setdefault(who, {})[column] = row
    found: dict[str, Table] = {}
    for title, lines in cells.items():
        lengths = {column: row.length for line in lines.values() for column, row in line.items()}
        columns = sorted(lengths, key=lambda column: lengths[column])
        summaries = {who: measure.summary(results[who]) for who in lines}
        more = list(dict.fromkeys(key for summary in summaries.values() for key in summary))
        header, rows = ["model", *columns, *more], []
        for who, line in lines.items():
            shown = [measure.show(line[column]) if column in line else "-" for column in columns]
            rows.append([who, *shown, *(str(summaries[who].get(key, "-")) for key in more)])
        if measure.comparison:
            header += [column.format(first=rows[0][0]) for column in measure.comparison]
            rows = [[*row, *_compared(report, measure, lines, row[0])] for row in rows]
        found[title] = (header, rows)
    return found


def _compared(report: Report, measure: type[Measure], lines: dict[str, dict[str, Row]], who: str) -> tuple[str, str]:
    """Return how a model compares with the first one of the table."""
    first = next(iter(lines))
    tokens = {m.name: m.tokens for m in report.models}
    if who == first:
        return "-", "-"
    if tokens[who] != tokens[first]:
        return "-", "other tokens"
    (mine,), (theirs,) = lines[who].values(), lines[first].values()
    return measure.compare(mine, theirs)


def sentences(report: Report) -> list[str]:
    """Return what is shown below the tables: the best model, the windows, the definitions, and the notes."""
    best = best_sentence(best_by_measure(report))
    known = {"Trained window": report.train_length, "target window": report.target_length}
    windows = ", ".join(f"{name}: {value} tokens" for name, value in known.items() if value)
    effective = [
        f"Effective length by {name} (k_max): {', '.join(f'{who} {k_max}' for who, k_max in found.items())} tokens. Up "
        "to this distance from the end, at least 20 % is found at every distance."
        for name in report.measures
        if (found := {m.name: m.results[name].k_max() for m in report.models if _far(m, name)})
    ]
    definitions = dict.fromkeys(result.described for m in report.models for result in m.results.values())
    notes = [f"Note ({m.name}): {note}" for m in report.models for note in m.notes]
    return [*([ALIKE, best] if best else []), *([f"{windows}."] if windows else []), *effective, *definitions, *notes]


def _far(model: ModelResult, name: str) -> bool:
    """Return whether a model's result of a measure says how far back answers were."""
    return name in model.results and any(row.distance is not None for row in model.results[name].rows)


def markdown(report: Report) -> str:
    """Return tables and sentences as Markdown, which also reads well on a terminal."""
    parts = [f"**{title}**\n\n{markdown_table(*table)}" for title, table in tables(report).items()]
    return "\n\n".join([*parts, *sentences(report)]) + "\n"


def html(report: Report, pictures: Sequence[Path] = ()) -> str:
    """Return one file with tables and pictures inside."""
    parts = []
    for title, (header, rows) in tables(report).items():
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>")
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<p><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></p>')
    parts += [f"<p>{escape(sentence)}</p>" for sentence in sentences(report)]
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Evaluation</title><style>{STYLE}</style>\n'
        f"<h1>Evaluation</h1>\n{body}\n</html>\n"
    )


def to_json(report: Report) -> str:
    """Return everything, down to the single prompt. What is not finite becomes null, which JSON can express."""
    data = {
        "best": best_sentence(best_by_measure(report)),
        "train_length": report.train_length,
        "target_length": report.target_length,
        "models": [
            {"name": m.name, "notes": m.notes, **m.facts, **{name: r.to_dict() for name, r in m.results.items()}}
            for m in report.models
        ],
    }
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_files(report: Report) -> dict[str, str]:
    """Return file name to content.

    `<measure>.csv` has a line per model, kind and length, `<measure>_depth.csv` also per depth, and
    `<measure>_<view>.csv` a line for each row of a second look at the same data.
    """
    lines: dict[str, list[tuple[str, Row]]] = {}
    for m in report.models:
        for name, result in m.results.items():
            for kind in result.kinds:
                lines.setdefault(f"{name}.csv", []).extend((m.name, row) for row in result.by_length(kind).values())
                cells = result.by_depth(kind).values()
                if cells:
                    lines.setdefault(f"{name}_depth.csv", []).extend((m.name, row) for row in cells)
            for row in result.rows:
                if row.view:
                    lines.setdefault(f"{name}_{row.view}.csv", []).append((m.name, row))
    return {name: _csv(rows) for name, rows in lines.items()}


def _csv(rows: Sequence[tuple[str, Row]]) -> str:
    more = _common(row.details for _, row in rows)
    # Columns that would be empty for all rows are left out.
    used = {
        "kind": any(row.kind for _, row in rows),
        "depth": any(row.depth is not None for _, row in rows),
        "standard_error": any(row.n == len(row.compared) > 1 for _, row in rows),
    }
    names = ["model", "kind", "length", "depth", "score", "standard_error", "n"]
    output = io.StringIO()
    writer = csv.DictWriter(
        output, [*(n for n in names if used.get(n, True)), *more], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    for who, row in rows:
        known = {name: getattr(row, name) for name in names[1:]}
        writer.writerow({"model": who, **known, **row.details})
    return output.getvalue()


def _common(details: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names that all rows have a figure for."""
    each = [{name for name, value in row.items() if isinstance(value, int | float)} for row in details]
    return sorted(set.intersection(*each)) if each else []


def write(report: Report, folder: str | Path, pictures: Sequence[Path] = ()) -> list[Path]:
    """Write results.json, report.md, report.html and the CSV files.

    Args:
        report: what was measured.
        folder: created if it does not exist.
        pictures: PNG files that `figures.draw` has written; report.html contains them.

    Returns:
        the files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"results.json": to_json(report), "report.md": markdown(report), **csv_files(report)}
    files["report.html"] = html(report, pictures)
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns padded to one width each, the first to the left, the others to the right."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in [header, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in cells
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
