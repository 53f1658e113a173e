"""Do engines compute what was trained? Logits past the old window, engine against transformers 5, and a passkey.

    python benchmarks/engines.py --older PYTHON --llama-cpp DIR --llama-cpp-python PYTHON --model FOLDER

--older is an interpreter with transformers 4, --llama-cpp a folder with convert_hf_to_gguf.py, --llama-cpp-python an
interpreter with llama-cpp-python, --model a trained and extended model, e.g. outputs/quickstart/pose. What is not named
is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import about, arguments, machine, markdown, places, save

ROOT = Path(__file__).parent.parent
# The tests' own list, so that what is measured is what is tested.
sys.path.append(str(ROOT))
from tests.models import ROPES  # noqa: E402

OLD, TARGET = 64, 512
PAGE = ROOT / "docs" / "serving.md"
WITH_LLAMA_CPP = Path(__file__).with_name("with_llama_cpp.py")


def save_model(folder: Path, rope: Any) -> None:
    """A random Llama of two layers, extended 64 → 512, saved as a run saves it, with its probe."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from pose_plugin import extend_context
    from pose_plugin.checkpoints import complete_folder
    from pose_plugin.checkpoints.probe import take_probe
    from pose_plugin.checkpoints.record import model_facts
    from pose_plugin.config import parse_settings

    plain = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=OLD,
        initializer_range=0.3,  # with the usual 0.02 a random model hardly attends to anything
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(extend_context(plain, TARGET, rope))
    model.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w2", unk_token="w1").save_pretrained(
        folder
    )
    settings = parse_settings({"target_length": TARGET, "rope": rope})
    complete_folder(folder, model.config, settings, facts=model_facts(model), probe=take_probe(model, TARGET))


def older(folder: Path, python: str, place: Path) -> dict[str, Any]:
    """transformers 4 on the same config.json, tokenizer class aside."""
    from pose_plugin.checkpoints.check import check_folder
    from pose_plugin.checkpoints.saved import read_saved
    from pose_plugin.export.transformers4 import write_older_form

    as_saved = check_folder(folder, python=python)
    rewritten = check_folder(write_older_form(read_saved(folder), place / f"{folder.name}-4"), python=python)
    return {
        "transformers": as_saved.transformers,
        "as saved": as_saved.numbers,
        "as saved, differs in": as_saved.differing(),
        "older form": rewritten.numbers,
        "older form, differs in": rewritten.differing(),
    }


def llama_cpp(folder: Path, home: str, python: str, place: Path, rows: int = 2) -> dict[str, Any]:
    """Converted by llama.cpp's own converter; 512 tokens at plain positions, the last 448 past the old window."""
    from pose_plugin.checkpoints.saved import read_saved
    from pose_plugin.export.llama_cpp import export
    from pose_plugin.utils.errors import PoSEError

    try:
        export(read_saved(folder))
    except PoSEError as error:
        return {"refused": str(error)}
    drawn = np.random.default_rng(0).integers(30, 100, (rows, TARGET)).tolist()
    asked = [{"ids": ids, "keep": TARGET - OLD, "plain": plain} for plain in (False, True) for ids in drawn]
    found = ask(convert(folder, home, place), python, asked, place)
    wanted = reference(folder, drawn, TARGET - OLD)
    # Elsewhere the extension is in the base or in a tensor, and there is no scaling to leave out.
    scaled = folder.name in ("linear", "yarn")
    return {
        "maximum": int(found["trained"]),
        "logits": distance([found[f"row{i}"] for i in range(rows)], wanted),
        "plain": distance([found[f"row{i + rows}"] for i in range(rows)], wanted) if scaled else None,
    }


def passkey(folder: Path, home: str, python: str, place: Path, trials: int, lengths: list[int]) -> dict[str, Any]:
    """Share of prompts whose five digits are the greedy continuation, token by token."""
    from transformers import AutoTokenizer

    from pose_plugin.evaluation.measures.passkey import Passkey

    measure = Passkey(trials=trials)
    measure.prepare(AutoTokenizer.from_pretrained(folder), lengths)
    rows = [document for length in lengths for document in measure.documents(length)]
    keep = max(len(row.answer) for row in rows) + 1
    asked = [{"ids": row.input_ids, "keep": keep, "plain": plain} for plain in (False, True) for row in rows]
    found = ask(convert(folder, home, place), python, asked, place)
    transformers = reference(folder, [row.input_ids for row in rows], keep)

    def shares(answers: list[np.ndarray]) -> dict[str, float]:
        right = [
            bool((answer[:-1].argmax(-1)[-len(row.answer) :] == row.answer).all())
            for row, answer in zip(rows, answers, strict=True)
        ]
        return {str(n): float(np.mean(right[i * trials : (i + 1) * trials])) for i, n in enumerate(lengths)}

    count = len(rows)
    return {
        "trials": trials,
        "transformers": shares(transformers),
        "llama.cpp": shares([found[f"row{i}"] for i in range(count)]),
        "llama.cpp without the scaling": shares([found[f"row{i + count}"] for i in range(count)]),
        "logits": distance([found[f"row{i}"] for i in range(count)], transformers),
    }


def convert(folder: Path, home: str, place: Path) -> Path:
    file = place / f"{folder.name}.gguf"
    run([sys.executable, str(WITH_LLAMA_CPP), "convert", home, str(folder), str(file)])
    return file


def ask(file: Path, python: str, rows: list[dict[str, Any]], place: Path) -> Any:
    asked, answered = place / "rows.json", place / "answers.npz"
    asked.write_text(json.dumps(rows))
    run([python, str(WITH_LLAMA_CPP), "logits", str(file), str(asked), str(answered)])
    return np.load(answered)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")


def reference(folder: Path, rows: list[list[int]], keep: int) -> list[np.ndarray]:
    """What transformers 5 answers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0, -keep:].numpy() for row in rows]


def distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    from pose_plugin.checkpoints.comparisons import logit_distance

    return max(logit_distance(f.tolist(), w.tolist()) for f, w in zip(found, wanted, strict=True))


def table(results: dict[str, Any]) -> str:
    rows = []
    for name, row in results["ropes"].items():
        old, llama = row.get("transformers 4") or {}, row.get("llama.cpp") or {}
        cells = [_number((old.get("as saved") or {}).get("logits")), _number((old.get("as saved") or {}).get("plain"))]
        refused = "refused" if llama.get("refused") else "–"
        cells += [_number(llama.get("logits"), refused), _number(llama.get("plain"), refused)]
        rows.append([name, *cells])
    header = ["rope", "transformers 4", "extension lost", "llama.cpp", "scaling left out"]
    parts = [markdown(header, rows)]
    if results.get("passkey"):
        found = results["passkey"]
        lengths = list(found["transformers"])
        names = ("transformers", "llama.cpp", "llama.cpp without the scaling")
        parts.append(
            markdown(["passkey", *lengths], [[name, *(f"{found[name][n]:.2f}" for n in lengths)] for name in names])
        )
    return "\n\n".join(parts)


def with_table(page: str, text: str) -> str:
    """The page with a new table between its two marks."""
    begin, end = "<!-- engines table: written by benchmarks/engines.py -->\n", "<!-- end -->"
    before, found, rest = page.partition(begin)
    assert found, f"{PAGE} has no place for the table"
    return f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"


def _number(value: float | None, otherwise: str = "–") -> str:
    return otherwise if value is None else f"{value:.1e}"


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--older", metavar="PYTHON", help="interpreter with transformers 4")
    parser.add_argument("--llama-cpp", metavar="DIR", help="folder of llama.cpp, with its converter")
    parser.add_argument("--llama-cpp-python", metavar="PYTHON", help="interpreter with llama-cpp-python")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="trained and extended model, for the passkey")
    parser.add_argument("--lengths", default="128,512,1024,2048", help="of the passkey prompts, tokens")
    args = parser.parse_args()
    if bool(args.llama_cpp) != bool(args.llama_cpp_python):
        parser.error("--llama-cpp and --llama-cpp-python go together")
    folder, _ = places(args.output)
    results: dict[str, Any] = {"machine": machine("torch", "transformers"), "ropes": {}}
    with tempfile.TemporaryDirectory() as home:
        place = Path(home)
        for name, rope in ROPES.items():
            save_model(place / name, rope)
            row = results["ropes"][name] = {}
            if args.older:
                row["transformers 4"] = older(place / name, args.older, place)
            if args.llama_cpp:
                row["llama.cpp"] = llama_cpp(place / name, args.llama_cpp, args.llama_cpp_python, place)
        results["passkey"] = None
        if args.model and args.llama_cpp:
            lengths = [int(length) for length in args.lengths.split(",")]
            results["passkey"] = passkey(
                args.model, args.llama_cpp, args.llama_cpp_python, place, 4 if args.quick else 50, lengths
            )
    save(results, folder / "engines.json")
    if args.output is None:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(results)), encoding="utf-8")
    print(table(results))
    print(f"\n{about(results['machine'])}")


if __name__ == "__main__":
    main()
