"""Several models side by side: tables for the terminal and for Markdown, JSON, CSV, and the pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.passkey import PasskeyResult
from pose_plugin.evaluation.perplexity import PerplexityResult

Table = tuple[list[str], list[list[str]]]
"""Header and rows, the first column a name."""


@dataclass
class ModelResult:
    """One row of the tables.

    Attributes:
        name: how the model is called in tables and pictures.
        passkey: its passkey result, if that was measured.
        perplexity: its perplexity result, if that was measured.
        notes: what a reader must know, e.g. lengths beyond the config's maximum.
        facts: what is known about the model (path, rope parameters, …), kept in the JSON.
    """

    name: str
    passkey: PasskeyResult | None = None
    perplexity: PerplexityResult | None = None
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """Results of several models, and the two windows to mark.

    Attributes:
        models: in the order of the rows; usually base, RoPE-only, trained.
        train_length: L_c, the trained window in tokens, if known.
        target_length: L_t, the wanted window in tokens, if known.
    """

    models: list[ModelResult]
    train_length: int | None = None
    target_length: int | None = None

    def tables(self) -> dict[str, Table]:
        """The tables that there are results for, by title."""
        tables = {}
        lengths = sorted({n for m in self.models if m.passkey for n in m.passkey.lengths})
        if lengths:
            rows = [
                [m.name, *(_share(m.passkey, n) for n in lengths), str(m.passkey.k_max())]
                for m in self.models
                if m.passkey
            ]
            tables["Passkey accuracy ± standard error"] = (["model", *map(str, lengths), "k_max"], rows)
        lengths = sorted({n for m in self.models if m.perplexity for n in m.perplexity.by_length})
        if lengths:
            rows = [[m.name, *(_perplexity(m.perplexity, n) for n in lengths)] for m in self.models if m.perplexity]
            tables["Sliding-window perplexity"] = (["model", *map(str, lengths)], rows)
        return tables

    def definitions(self) -> list[str]:
        """What was measured, each sentence once."""
        found = [r.definition for m in self.models for r in (m.passkey, m.perplexity) if r is not None]
        return list(dict.fromkeys(found))

    def text(self) -> str:
        """The tables with their definitions and notes, for the terminal."""
        parts = [f"{title}\n{plain_table(*table)}" for title, table in self.tables().items()]
        return "\n\n".join(["\n\n".join(parts), *self.definitions(), *self._notes()])

    def markdown(self) -> str:
        """The same as Markdown, as for a model card."""
        parts = [f"**{title}**\n\n{markdown_table(*table)}" for title, table in self.tables().items()]
        return "\n\n".join([*parts, *self._windows(), *self.definitions(), *self._notes()]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Everything, down to the single trial."""
        return {
            "train_length": self.train_length,
            "target_length": self.target_length,
            "models": [
                {
                    "name": m.name,
                    "notes": m.notes,
                    **m.facts,
                    **{
                        name: result.to_dict()
                        for name, result in (("passkey", m.passkey), ("perplexity", m.perplexity))
                        if result is not None
                    },
                }
                for m in self.models
            ],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON; what is not finite becomes null, which every reader of JSON understands."""
        return json.dumps(_finite(self.to_dict()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def csv_files(self) -> dict[str, str]:
        """File name to content: one line a model and length (and depth, and position range)."""
        files: dict[str, list[list[Any]]] = {
            "passkey.csv": [["model", "length", "accuracy", "standard_error", "correct", "trials"]],
            "passkey_depth.csv": [["model", "length", "depth", "accuracy", "correct", "trials"]],
            "perplexity.csv": [["model", "length", "perplexity", "loss", "tokens", "windows", "stride"]],
            "perplexity_position.csv": [["model", "length", "from", "to", "perplexity", "loss", "tokens"]],
        }
        for m in self.models:
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
        return {name: _csv(rows) for name, rows in files.items() if len(rows) > 1}

    def write(self, folder: str | Path, figures: bool = True) -> list[Path]:
        """Writes results.json, report.md, the CSV files and, with `figures`, the PNG files.

        Args:
            folder: made if it does not exist.
            figures: whether to draw, which needs matplotlib. Drawn last, so the numbers are safe by then.

        Returns:
            the files written.

        Raises:
            PoSEError: figures are asked for and matplotlib is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"results.json": self.to_json(), "report.md": self.markdown(), **self.csv_files()}
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8", newline="")
        written = [folder / name for name in files]
        if figures:
            from pose_plugin.evaluation.figures import draw

            written += draw(self, folder)
        return written

    def _windows(self) -> list[str]:
        known = {"Trained window": self.train_length, "target window": self.target_length}
        text = ", ".join(f"{name}: {value} tokens" for name, value in known.items() if value)
        return [text + "."] if text else []

    def _notes(self) -> list[str]:
        return [f"Note ({m.name}): {note}" for m in self.models for note in m.notes]


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
