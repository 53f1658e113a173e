"""Compare a served model with the same model in this process, prompt by prompt.

    POSE_LLAMA_CPP=FOLDER python benchmarks/served.py                          # the quick start's base, minutes
    POSE_LLAMA_CPP=FOLDER python benchmarks/served.py --model FOLDER --brief   # e.g. SmolLM2-135M: passkeys and RULER
    python benchmarks/served.py --table                                        # the table of docs/evaluation.md

The quick start's base is extended by YaRN. The servers are llama.cpp's, on the same weights as GGUF in float32, and
`transformers serve`. All decode greedily. Rows of a model replace those of an earlier run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, about, arguments, machine, markdown, places, save

ROOT = Path(__file__).parent.parent
BASE = ROOT / "example_configs" / "quickstart" / "base"
# Each line is another one, so that texts have no two equal places.
TEXT = "".join(f"Line {i} tells of the sea and the wind.\n" for i in range(400))
# By measure: its settings, and lengths in tokens.
MEASURES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "passkey": ({"trials": 10}, [128, 180, 256]),
    "needle": ({"trials": 4}, [600, 1100]),
    "topics": ({"trials": 3}, [1100]),
    "haystack": ({"facts": 5, "texts": [TEXT, TEXT[5000:]]}, [600, 1100]),
    "ruler": ({"trials": 4, "ruler_tasks": ["niah_single_1", "vt", "fwe"]}, [2048]),
}
BRIEF: dict[str, tuple[dict[str, Any], list[int]]] = {
    "passkey": ({"trials": 5}, [256, 512]),
    "haystack": ({"facts": 3, "texts": [TEXT]}, [600]),
    "ruler": ({"trials": 2, "ruler_tasks": ["niah_multikey_2", "vt"]}, [600]),
}
# By default, llama.cpp keeps keys and values in float16.
LLAMA_CPP: dict[str, tuple[str, ...]] = {
    "llama.cpp": (),
    "llama.cpp, float32 cache": ("-ctk", "f32", "-ctv", "f32", "-fa", "off"),
}
COLUMNS = ("server", "model", "measure", "tokens", "prompts", "equal answers", "equal scores", "score", "cached tokens")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model (default: the quick start's base, extended)")
    parser.add_argument("--brief", action="store_true", help="fewer and shorter prompts, for a larger model")
    parser.add_argument("--table", action="store_true", help="print the table of the committed results")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads((RESULTS / "served.json").read_text())))
        return
    file = places(args.output)[0] / "served.json"
    chosen = BRIEF if args.brief else MEASURES
    if args.quick:
        chosen = {"passkey": ({"trials": 2}, [128])}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or extended(Path(temporary) / "quickstart-yarn")
        kept = json.loads(file.read_text())["rows"] if file.exists() else []
        rows = [row for row in kept if row["model"] != folder.name]
        versions = {**machine("torch", "transformers", "openai"), "llama.cpp": _llama_cpp_version()}
        for row in compare(folder, chosen):
            rows.append(row)
            save({"machine": versions, "rows": rows}, file)
            print({key: value for key, value in row.items() if key != "different"}, flush=True)
    print(table({"machine": versions, "rows": rows}))


def extended(folder: Path) -> Path:
    """Save the quick start's base with a window of 4,096 tokens: llama.cpp refuses prompts beyond the window."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from pose_plugin import extend_context

    config = extend_context(AutoConfig.from_pretrained(BASE), 4096, rope="yarn")
    AutoModelForCausalLM.from_pretrained(BASE, config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


def compare(folder: Path, chosen: dict[str, tuple[dict[str, Any], list[int]]]) -> Iterator[dict[str, Any]]:
    """Yield a row per server and measure."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pose_plugin.evaluation.measures import MEASURES as KINDS
    from pose_plugin.evaluation.model import evaluating
    from pose_plugin.evaluation.served import ServedModel
    from pose_plugin.utils.server import Server

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = []
    with evaluating(model):
        for name, (settings, lengths) in chosen.items():
            measure = KINDS[name](progress=False, **settings)
            measure.prepare(tokenizer, lengths)
            asked += [(measure, length, answers(measure, model, length)) for length in lengths]
    for server_name, url, served_model in servers(folder, max(length for _, length, _ in asked)):
        server = Server(url, served_model)
        cached = count_cached(server)
        served = ServedModel(server, tokenizer, concurrency=1)
        for name, (_, lengths) in chosen.items():
            cached.clear()
            pairs = [
                (measure, length, here, answers(measure, served, length))
                for measure, length, here in asked
                if measure.name == name
            ]
            row = {"server": server_name, "model": folder.name, "measure": name, "lengths": lengths}
            yield {**row, "form": served._form, "cached": sum(cached), **outcome(pairs)}


def answers(measure: Any, model: Any, length: int) -> list[str]:
    """Return the answer to each question of a length."""
    questions = measure.questions(length)
    kept = measure.answer(model, length, questions)
    return [kept.get(question) for question in questions]


def outcome(pairs: list[tuple[Any, int, list[str], list[str]]]) -> dict[str, Any]:
    """Count the prompts with equal answers and scores.

    Args:
        pairs: measure, length, answers in this process and those of the server.
    """
    scores: list[tuple[float, float]] = []
    different, equal = [], 0
    for measure, length, here, served in pairs:
        questions = measure.questions(length)
        judged = [measure.judge(length, questions, each).rows for each in (here, served)]
        scores += [(ours.score, theirs.score) for ours, theirs in zip(*judged, strict=True)]
        equal += sum(ours == theirs for ours, theirs in zip(here, served, strict=True))
        different += [
            {"length": length, "here": ours, "served": theirs}
            for ours, theirs in zip(here, served, strict=True)
            if ours != theirs
        ]
    return {
        "prompts": sum(len(here) for _, _, here, _ in pairs),
        "equal_answers": equal,
        "scored": len(scores),
        "equal_scores": sum(ours == theirs for ours, theirs in scores),
        "score": sum(ours for ours, _ in scores) / len(scores),
        "different": different,
    }


def count_cached(server: Any) -> list[int]:
    """Return a list that grows by the tokens of each prompt that the server had in its prefix cache, if it counts."""
    found: list[int] = []
    create = server.client.completions.create

    def counted(**parameters: Any) -> Any:
        answer = create(**parameters)
        details = getattr(getattr(answer, "usage", None), "prompt_tokens_details", None)
        found.append(getattr(details, "cached_tokens", None) or 0)
        return answer

    server.client.completions.create = counted
    return found


def servers(folder: Path, longest: int) -> Iterator[tuple[str, str, str | None]]:
    """Start each server that is installed; yield its name, URL, and the name of the model."""
    from tests.doctor import real_servers

    found = real_servers.llama_cpp()
    if found is not None:
        program, converter = found
        with tempfile.TemporaryDirectory() as temporary:
            file = real_servers.to_gguf(converter, folder, Path(temporary) / "model.gguf")
            for name, options in LLAMA_CPP.items():
                with real_servers.llama_server(program, file, "-c", str(longest + 256), *options) as url:
                    yield name, url, None
    if real_servers.has_transformers_serve():
        with real_servers.transformers_server(folder) as url:
            yield "transformers serve", url, str(folder)


def _llama_cpp_version() -> str:
    from tests.doctor import real_servers

    found = real_servers.llama_cpp()
    if found is None:
        return "none"
    ran = subprocess.run([found[0], "--version"], capture_output=True, text=True)
    words = (ran.stdout + ran.stderr).partition("version:")[2].split()
    return words[0] if words else "unknown"


def table(result: dict[str, Any]) -> str:
    """Return the measurements as a Markdown table."""
    rows = [
        [
            row["server"],
            row["model"],
            row["measure"],
            ", ".join(map(str, row["lengths"])),
            str(row["prompts"]),
            str(row["equal_answers"]),
            f"{row['equal_scores']} of {row['scored']}",
            f"{row['score']:.2f}",
            f"{row['cached']:,}" if row["cached"] else "",
        ]
        for row in result["rows"]
    ]
    return markdown(COLUMNS, rows) + "\n\n" + about(result["machine"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
