"""What `pose-plugin doctor --url` reports of real servers: with the RoPE override, without it, and of a weak model.

    POSE_LLAMA_CPP=llama.cpp python benchmarks/doctor_servers.py

It writes results/doctor_servers.json and prints the table of docs/doctor.md. Needs llama.cpp and `transformers serve`;
tests/doctor/real_servers.py finds and starts them. The model is the quick start's base of 156 thousand parameters. YaRN
extends it from 128 to 256 tokens without training, which it survives. Four times as far it loses numbers: a weak model.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import HERE, about, arguments, machine, markdown, places, save

sys.path.insert(0, str(HERE.parent))
from pose_plugin import extend_context
from pose_plugin.cli.main import main as pose_plugin
from tests.doctor import real_servers

BASE = HERE.parent / "example_configs" / "quickstart" / "base"
LENGTHS = "100,220"


def extended(folder: Path, factor: int) -> Path:
    """Copy the model and raise its window by YaRN."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(BASE)
    shutil.copytree(BASE, folder)
    extend_context(config, factor * config.max_position_embeddings, "yarn").save_pretrained(folder)
    return folder


def asked(url: str, folder: Path, model: str | None = None) -> dict[str, Any]:
    """Run the command; return its report, exit code, seconds and requests."""
    words = ["doctor", "--url", url, "--like", str(folder), "--lengths", LENGTHS, "--yes", "--json"]
    out, err, start = io.StringIO(), io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = pose_plugin([*words, *(["--model", model] if model else [])])
    seconds = time.perf_counter() - start
    sent = re.search(r"(\d+) requests", err.getvalue())
    if not out.getvalue() or not sent:
        sys.exit(err.getvalue())
    found = json.loads(out.getvalue().splitlines()[-1])
    return {
        "rope": found["rope"],
        "distances": {name: round(value, 3) for name, value in found["distances"].items()},
        "logprobs": found["logprobs"],
        "found": sum(needle["found"] for needle in found["needles"]),
        "numbers": len(found["needles"]),
        "findings": [f"{each['severity']}: {each['key']}" for each in found["findings"]],
        "code": code,
        "requests": int(sent[1]),
        "seconds": round(seconds, 1),
    }


def rows(work: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and a report per server."""
    program, converter = real_servers.llama_cpp() or sys.exit("llama.cpp is missing, see the docstring")
    scaled, weak = extended(work / "extended", 2), extended(work / "weak", 4)
    file = real_servers.to_gguf(converter, scaled, work / "extended.gguf")
    for name, options in (("override applied", ()), ("override removed", ("--rope-scaling", "none"))):
        with real_servers.llama_server(program, file, "-c", "0", *options) as url:
            yield f"llama.cpp, {name}", asked(url, scaled)
    for name, folder in (("override applied", scaled), ("override removed", BASE)):
        with real_servers.transformers_server(folder) as url:
            yield f"transformers serve, {name}", asked(url, scaled, str(folder))
    file = real_servers.to_gguf(converter, weak, work / "weak.gguf")
    with real_servers.llama_server(program, file, "-c", "0") as url:
        yield "llama.cpp, override applied, weak model", asked(url, weak)


def table(results: dict[str, Any]) -> str:
    header = ["server", "verdict", "nats, as configured", "nats, without scaling", "numbers found", "exit code",
              "requests", "seconds"]  # fmt: skip
    lines = []
    for name, row in results["rows"].items():
        nats = [f"{row['distances'][rope]:.3f}" for rope in ("as configured", "without its scaling")]
        found = f"{row['found']} of {row['numbers']}"
        code, requests, seconds = str(row["code"]), str(row["requests"]), f"{row['seconds']:.0f}"
        lines.append([name, VERDICTS[row["rope"]], *nats, found, code, requests, seconds])
    return f"{markdown(header, lines)}\n\n{about(results['machine'])}"


VERDICTS = {"applied": "applies the scaling", "other": "ignores the scaling", "unclear": "unclear", "none": "no rope"}


def run() -> None:
    options = arguments(__doc__).parse_args()
    folder, _ = places(options.output)
    with tempfile.TemporaryDirectory() as work:
        found = dict(rows(Path(work)))
    results = {"machine": machine("transformers", "torch", "openai"), "rows": found}
    save(results, folder / "doctor_servers.json")
    print(table(results))


if __name__ == "__main__":
    run()
