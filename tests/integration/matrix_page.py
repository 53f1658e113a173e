"""Write the tables of docs/verified.md from what `tests.integration.matrix` measures; the tests compare them.

python -m tests.integration.matrix_page    # measures what this environment can, and rewrites those tables
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.integration import matrix

PAGE = Path(__file__).parents[2] / "docs" / "verified.md"
COLUMNS = (*matrix.BY_POSITIONS, *matrix.FLASH)
Table = dict[str, dict[str, str]]


def measure(framework: str, route: str, home: Path) -> dict[str, str]:
    """Return the verdict for each backend, over both batch sizes and all kinds of checkpointing."""
    from tests.forked import forked
    from tests.integration import axolotl_runs

    def trl(batch: int, backends: tuple[str, ...]) -> dict:
        folder = home / re.sub(r"\W+", "_", f"{route} {batch} {backends[0]}")
        return forked(matrix.trl_effects, folder, route, batch, backends).value

    def axolotl(batch: int, backends: tuple[str, ...]) -> dict:
        folder = home / re.sub(r"\W+", "_", f"{route} {batch} {backends[0]}")
        paths = {"output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared")}
        values = axolotl_runs.base_yaml(home, **paths, micro_batch_size=batch, **matrix.AXOLOTL[route])
        return forked(matrix.axolotl_effects, values, route, backends).value

    if framework == "TRL":
        return matrix.verdicts(trl, (matrix.BY_POSITIONS, matrix.FLASH))
    packed = matrix.AXOLOTL[route].get("sample_packing")
    families = (matrix.BY_POSITIONS, matrix.FLASH, *([matrix.XFORMERS] if packed else []))
    return matrix.verdicts(axolotl, families)


def write(framework: str, table: Table) -> None:
    """Replace a table between its marks in the page."""
    columns = list(dict.fromkeys(name for row in table.values() for name in row))
    lines = [f"| {framework} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for route, row in table.items():
        lines.append(f"| {route} | " + " | ".join(row.get(name, NOT_A_ROUTE) for name in columns) + " |")
    begin, end = f"<!-- {framework}: written by tests.integration.matrix_page -->", "<!-- end -->"
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


# Without packing, Axolotl replaces Llama's forward by one that does not fit current transformers.
NOT_A_ROUTE = "refused: Axolotl's own forward fails"


def read(framework: str) -> Table:
    """Return the table of the page, without cells that are not a route of the framework."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- {framework}:")[2].partition("<!-- end -->")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return {
        row[0]: {name: cell for name, cell in zip(head[1:], row[1:], strict=True) if cell != NOT_A_ROUTE}
        for row in rows
    }


def main() -> None:
    import importlib.util

    import tests.conftest  # noqa: F401 - sets the environment before a framework is imported

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write("TRL", {route: measure("TRL", route, home / "trl") for route in matrix.TRL})
        if importlib.util.find_spec("axolotl") is not None:
            import axolotl  # noqa: F401 - before the fork, see tests/forked.py

            (home / "axolotl").mkdir()
            write("Axolotl", {route: measure("Axolotl", route, home / "axolotl") for route in matrix.AXOLOTL})


if __name__ == "__main__":
    main()
