"""Several models in one report: tables for the terminal and for Markdown, JSON, CSV and a web page.

Everything is made of the rows of results and of what their measures declare.
"""

from __future__ import annotations

import base64
import csv
import datetime
import io
import json
import platform
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from pose_plugin._version import __version__
from pose_plugin.checkpoints.record import hardware
from pose_plugin.evaluation.best import best_by_measure, best_sentence
from pose_plugin.evaluation.figures import Picture
from pose_plugin.evaluation.measure import Measure
from pose_plugin.evaluation.measures import MEASURES
from pose_plugin.evaluation.results import ERRORS, FEWEST, Report, Row
from pose_plugin.rope.read import far_rope
from pose_plugin.utils.files import listed_files, staged

ALIKE = (
    f"Best by measure: = is equal, ≈ is within noise of the best (on the same prompts or windows the mean difference "
    f"is below {ERRORS} of its standard errors, or there are fewer than {FEWEST})."
)
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "section{border-top:1px solid #ccc;margin-top:2em;padding-top:.5em}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}h2{font-size:1.15em;margin:1.2em 0 .5em}"
    "figure{margin:1.5em 0}img{max-width:100%}figcaption,p.how{font-size:.87em;color:#555;max-width:52em}"
    "table.left td,table.left th,table.best td:nth-child(2),table.best th:nth-child(2){text-align:left}"
)
Table = tuple[list[str], list[list[str]]]
"""Header and rows, the first column a name."""


def tables(report: Report) -> dict[str, Table]:
    """Return a table for each measure and kind that there are results for, by title."""
    found: dict[str, Table] = {}
    for name in report.measures:
        found |= _measured(report, MEASURES[name])
    return found | _best(report)


def _best(report: Report) -> dict[str, Table]:
    """Return the table of the best models; {} with fewer than two models to compare."""
    best = best_by_measure(report)
    if best:
        rows = [
            [b.measure, " ≈ ".join([" = ".join(b.names), *b.close]),
             *(f"{b.values[m.name]:.3g}" if m.name in b.values else "-" for m in report.models)]
            for b in best
        ]  # fmt: skip
        return {"Best by measure": (["measure", "best", *(m.name for m in report.models)], rows)}
    return {}


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
    """Return what is shown below the tables: the best model, windows, definitions, notes, date and versions."""
    names = report.measures
    effective = [sentence for name in names for sentence in _effective(report, name)]
    definitions = [sentence for name in names for sentence in _definitions(report, name)]
    return [*_ranking(report), *_windows(report), *effective, *definitions, *_notes(report), written()]


def _ranking(report: Report) -> list[str]:
    best = best_sentence(best_by_measure(report))
    return [ALIKE, best] if best else []


def _windows(report: Report) -> list[str]:
    known = {"Trained window": report.train_length, "target window": report.target_length}
    windows = ", ".join(f"{name}: {value} tokens" for name, value in known.items() if value)
    return [f"{windows}."] if windows else []


def _effective(report: Report, name: str) -> list[str]:
    """Return the sentence on the effective length by one measure, if it says how far back answers were."""
    results = {m.name: m.results[name] for m in report.models if name in m.results}
    found = {who: r.k_max() for who, r in results.items() if any(row.distance is not None for row in r.rows)}
    return [
        f"Effective length by {name} (k_max): {', '.join(f'{who} {k_max}' for who, k_max in found.items())} tokens. Up "
        "to this distance from the end, at least 20 % is found at every distance."
    ] if found else []  # fmt: skip


def _definitions(report: Report, name: str) -> list[str]:
    return list(dict.fromkeys(m.results[name].described for m in report.models if name in m.results))


def _notes(report: Report) -> list[str]:
    """Return each note once, with the models that it is about."""
    about: dict[str, list[str]] = {}
    for model in report.models:
        for note in model.notes:
            about.setdefault(note, []).append(model.name)
    return [f"Note ({', '.join(names)}): {note}" for note, names in about.items()]


def written() -> str:
    """Return the date, the hardware and the versions of this process, in a sentence."""
    from torch import distributed

    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    versions = {"pose-plugin": __version__, "Python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("torch", "transformers")}
    listed = ", ".join(" ".join(each) for each in versions.items())
    return f"Written on {datetime.date.today().isoformat()} on {hardware(ranks)}, with {listed}."


def markdown(report: Report) -> str:
    """Return tables and sentences as Markdown, which also reads well on a terminal."""
    parts = [f"**{title}**\n\n{markdown_table(*table)}" for title, table in tables(report).items()]
    return "\n\n".join([*parts, *sentences(report)]) + "\n"


def html(report: Report, pictures: Sequence[Picture] = ()) -> str:
    """Return one file: the models and the best ones, then tables, pictures and definition of each measure."""
    parts = [f"<p>{escape(sentence)}</p>" for sentence in [written(), *_windows(report)]]
    parts.append(_html_table("Models", _models(report), "left"))
    parts += [_html_table(title, table, "best") for title, table in _best(report).items()]
    parts += [f'<p class="how">{escape(sentence)}</p>' for sentence in _ranking(report)]
    for name in report.measures:
        parts.append("<section>")
        parts += [_html_table(title, table) for title, table in _measured(report, MEASURES[name]).items()]
        parts += [_html_figure(picture) for picture in pictures if picture.measure == name]
        said = [*_effective(report, name), *_definitions(report, name)]
        parts += [f'<p class="how">{_html_code(sentence)}</p>' for sentence in said]
        parts.append("</section>")
    parts += [f"<p>{_html_code(note)}</p>" for note in _notes(report)]
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Evaluation</title><style>{STYLE}</style>\n<h1>Evaluation</h1>\n{body}\n</html>\n"
    )


def _models(report: Report) -> Table:
    """Return where each model is and how far it reaches, as its config says."""
    rows = []
    for model in report.models:
        rope = far_rope(model.facts.get("rope_parameters"))
        kind = str(rope.get("rope_type", "-")) + (f" × {rope['factor']:g}" if rope.get("factor") else "")
        window = model.facts.get("max_position_embeddings") or model.facts.get("window") or "-"
        rows.append([model.name, str(model.facts.get("path", "-")), f"{window}", kind])
    return ["model", "folder or address", "window (tokens)", "RoPE"], rows


def _html_table(title: str, table: Table, style: str = "") -> str:
    header, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><table class="{style}"><tr>{head}</tr>{body}</table>'


def _html_figure(picture: Picture) -> str:
    # As an image and not as elements of the page: the ids inside of several SVGs would clash.
    data = base64.b64encode(picture.svg.read_bytes()).decode()
    image = f'<img alt="{escape(picture.png.stem)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def _html_code(sentence: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(sentence))


def to_json(report: Report, files: Sequence[str] = ()) -> str:
    """Return everything, down to the single prompt. What is not finite becomes null, which JSON can express.

    Args:
        files: names of the other files of the same report.
    """
    data = {
        "best": best_sentence(best_by_measure(report)),
        "train_length": report.train_length,
        "target_length": report.target_length,
        "models": [
            {"name": m.name, "notes": m.notes, **m.facts, **{name: r.to_dict() for name, r in m.results.items()}}
            for m in report.models
        ],
        "files": sorted(files),
    }
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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


def write(report: Report, folder: str | Path, pictures: Sequence[Picture] = ()) -> list[Path]:
    """Write results.json, report.md, report.html and the CSV files, and remove files of an earlier report.

    Args:
        folder: created if it does not exist.
        pictures: what `figures.draw` has drawn; report.html contains the SVG files.

    Returns:
        the files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.md": markdown(report), **csv_files(report), "report.html": html(report, pictures)}
    names = {*files, *(file.name for picture in pictures for file in (picture.png, picture.svg))}
    with staged(folder) as stage:
        for file in listed_files(folder / "results.json"):
            if file.name not in names:
                stage.remove(file.name)
        for name, content in {**files, "results.json": to_json(report, [*names])}.items():
            stage.write(name, content)
    return [folder / name for name in ("results.json", *files)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns padded to one width each, the first to the left, the others to the right."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in [header, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in cells
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])
