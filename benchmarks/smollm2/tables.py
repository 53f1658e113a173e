"""Tables and the picture of the SmolLM2 run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import about, canvas, markdown

METHODS = {"pose": "PoSE", "no-skip": "no skip"}
COLOURS = {"RoPE only": "tab:gray", "no skip": "tab:orange", "PoSE": "black"}


def table(result: dict[str, Any]) -> str:
    """All tables, one below the other, and what they were measured on."""
    models = result["models"]
    parts = [
        ("Loss by position, nats per token", loss_rows(result)),
        (f"Loss at positions {result['window'] * 7 // 8}–{result['window']}, by text", text_rows(result)),
        ("Gap probe, nats per token", rows({name: row["gap"] for name, row in models.items()}, "{:.2f}")),
        ("Passkey, found / prompts", passkey_rows(models)),
    ]
    if any("topics" in row for row in models.values()):
        parts.append(("Topics", rows({name: row["topics"] for name, row in models.items()}, "{:.2f}")))
    return "\n\n".join([*(f"**{title}**\n\n{text}" for title, text in parts), about(result["machine"])])


def rows(found: Mapping[str, Mapping[str, float]], form: str) -> str:
    keys = list(dict.fromkeys(key for row in found.values() for key in row))
    return markdown(["model", *keys], [[name, *(form.format(row[key]) for key in keys)] for name, row in found.items()])


def loss_rows(result: dict[str, Any]) -> str:
    """Means over the texts of each eighth of the window."""
    part = result["window"] // 8
    found = {}
    for name, row in result["models"].items():
        texts = list(row["loss"].values())
        means = {start: statistics.fmean(text[start] for text in texts) for start in texts[0]}
        found[name] = {f"{int(start)}–{int(start) + part}": mean for start, mean in means.items()}
    return rows(found, "{:.2f}")


def text_rows(result: dict[str, Any]) -> str:
    last = str(result["window"] * 7 // 8)
    found = {
        name: {text: losses[last] for text, losses in row["loss"].items()} for name, row in result["models"].items()
    }
    return rows(found, "{:.2f}")


def passkey_rows(models: dict[str, Any]) -> str:
    lengths = sorted({int(n) for row in models.values() for n in row["passkey"]})
    counts = {name: [row["passkey"][str(n)] for n in lengths] for name, row in models.items()}
    return markdown(
        ["model", *map(str, lengths)],
        [[name, *(f"{c['found']}/{c['trials']}" for c in row)] for name, row in counts.items()],
    )


def summary(result: dict[str, Any]) -> str:
    """Return the table of README.md: passkeys by length, and the mean loss at the end of the evaluated window."""
    last = str(result["window"] * 7 // 8)
    lengths = sorted({int(n) for row in result["models"].values() for n in row["passkey"]})
    found = []
    for name, row in result["models"].items():
        counts = [row["passkey"][str(n)] for n in lengths]
        loss = statistics.fmean(text[last] for text in row["loss"].values())
        cells = [*(f"{count['found']}/{count['trials']}" for count in counts), f"{loss:.2f}"]
        label = name.replace("yarn", "YaRN")
        found.append([f"**{label}**" if name.endswith("PoSE") else label, *cells])
    window = f"loss, tokens {int(last):,}–{result['window']:,}"
    return markdown(["passkeys found in prompts of", *(f"{n:,} tokens" for n in lengths), window], found)


def draw(result: dict[str, Any], path: Path) -> None:
    """Loss by position in each text and the gap probe; a colour for each method, a line style for each rope."""
    texts = result["texts"]
    styles = dict(zip(result["ropes"], ("-", "--"), strict=False))
    with canvas(path, 3.2 * (len(texts) + 1), 3.2, columns=len(texts) + 1) as (figure, axes):
        for name, row in result["models"].items():
            rope, _, method = name.partition(", ")
            style = {"color": COLOURS.get(method, "tab:red"), "linestyle": styles.get(rope, "-"), "label": name}
            for panel, text in zip(axes, texts, strict=False):
                starts = [int(start) + result["window"] // 16 for start in row["loss"][text]]
                panel.plot(starts, list(row["loss"][text].values()), **style)
            axes[-1].plot([int(n) for n in row["gap"]], list(row["gap"].values()), **style)
        for panel, title in zip(axes, [*texts, "gap probe"], strict=True):
            panel.set_title(title)
            panel.set_xlabel("position (tokens)")
            panel.locator_params(axis="x", nbins=5)
        axes[0].set_ylabel("loss (nats per token)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
