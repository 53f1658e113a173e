"""Measure what many questions on one cached text save: forty on one text, against one text per question.

    OMP_NUM_THREADS=1 python benchmarks/cached_haystack.py --lengths 4096 8192             # the quick start's model
    OMP_NUM_THREADS=1 python benchmarks/cached_haystack.py --model FOLDER --lengths 32768  # e.g. SmolLM2's

Reading a text once and asking all questions is timed as a whole. Reading it for one question is timed `--prompts` times
and multiplied by the number of questions. Both are in the same process and take turns. Times are processor times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import about, arguments, machine, markdown, places, save

ROOT = Path(__file__).parent.parent
BASE = ROOT / "example_configs" / "quickstart" / "base"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=str(BASE), help="folder of a model (default: the quick start's)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="tokens of a text")
    parser.add_argument("--questions", type=int, default=40, help="facts that are asked for (default 40)")
    parser.add_argument("--prompts", type=int, default=1, help="single prompts that are timed (default 1)")
    args = parser.parse_args()
    lengths, prompts = ([2048], 1) if args.quick else (args.lengths, args.prompts)
    rows = [one(args.model, length, args.questions, prompts) for length in lengths]
    result = {"machine": machine("torch", "transformers"), "model": Path(args.model).name, "rows": rows}
    save(result, places(args.output)[0] / "cached_haystack.json")
    print(table(result))


def one(folder: str, length: int, questions: int, prompts: int) -> dict[str, Any]:
    """Time one length.

    Args:
        folder: of the model.
        length: tokens of the text.
        questions: facts in it.
        prompts: single prompts to time.
    """
    import torch
    from recall.bands import ask
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pose_plugin.evaluation.generation import cached
    from pose_plugin.evaluation.measures.haystack import Wording, build
    from pose_plugin.evaluation.model import evaluating
    from pose_plugin.evaluation.prompts import token_ids

    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    wording = Wording(fact="{name} {key}.")
    sentences = "".join(f"Line {i} tells of the sea and the wind.\n" for i in range(length // 8))
    text = build(tokenizer, wording, token_ids(tokenizer, sentences), length, questions, seed=0)

    def answers(facts):
        return ask(model, tokenizer, cached(model, text.ids), facts, wording.question)

    with evaluating(model):
        cached(model, text.ids)  # the first forward also fills caches
        single, together = 0.0, 0.0
        for number in range(prompts):
            fact = text.facts[number * questions // prompts]
            single += _seconds(lambda fact=fact: answers([fact]))
            if number == 0:
                together = _seconds(lambda: answers(text.facts))
    return {
        "length": length,
        "questions": questions,
        "together_s": together,
        "one_s": single / prompts,
        "ratio": single / prompts * questions / together,
    }


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def table(result: dict[str, Any]) -> str:
    """Return the measurements as a Markdown table."""
    rows = [
        [
            str(row["length"]),
            str(row["questions"]),
            f"{row['together_s']:.1f} s",
            f"{row['one_s']:.1f} s",
            f"{row['ratio']:.1f}",
        ]
        for row in result["rows"]
    ]
    header = ["tokens", "questions", "all on one text", "one prompt", "times as fast"]
    return markdown(header, rows) + f"\n\nModel: {result['model']}. " + about(result["machine"])


if __name__ == "__main__":
    main()
