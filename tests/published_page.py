"""Write the table of published models into docs/verified.md: python -m tests.published_page

The rows come from tests/data/published_configs; tests/test_published_configs.py checks each of them, and the page.
"""

from __future__ import annotations

from pathlib import Path

from pose_plugin.rope import plan_rope
from tests.published import FACTORS, REFUSALS, Published, extensions, published

PAGE = Path(__file__).parents[1] / "docs" / "verified.md"
BEGIN, END = "<!-- published models: written by tests.published_page -->", "<!-- end -->"


def row(base: Published) -> str:
    if base.refused:
        before, outcome = "–", f"error: {REFUSALS[base.refused]}"
    else:
        before = plan_rope(base.full, base.window, "none").before.partition("; window")[0]
        outcome = "all kinds"
        if base.unlike:
            reasons = ", ".join(sorted({REFUSALS[key] for key in base.unlike.values()}))
            outcome = f"all but {', '.join(base.unlike)}: {reasons}"
    original = "–" if base.original in (None, base.window) else str(base.original)
    return f"| {base.model} | {base.model_type} | {before} | {base.window or '–'} | {original} | {outcome} |"


def table() -> str:
    bases = published()
    types = {base.model_type for base in bases}
    refused = [base for base in bases if base.refused]
    extended = sum(len(extensions(base)) for base in bases)
    summary = (
        f"{len(bases)} published models of {len(types)} model types: {extended} extensions by a factor of "
        f"{' or '.join(map(str, FACTORS))}, and {len(refused)} models that raise an error."
    )
    head = ["| model | model type | RoPE as published | window | original | kinds of RoPE |", "|---" * 6 + "|"]
    return "\n".join([summary, "", *head, *map(row, bases)])


def page() -> str:
    """Return the page with a fresh table."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    if not mark:
        raise SystemExit(f"{PAGE} has no line {BEGIN}")
    return "\n".join([before + mark, "", table(), "", END + rest.partition(END)[2]])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
