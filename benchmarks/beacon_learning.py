"""Do beacons learn to carry what has left the window? The quick start's tiny model, window 128, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/beacon_learning.py                # some five minutes of one core a run
    OMP_NUM_THREADS=1 python benchmarks/beacon_learning.py --ablation     # masks and ratios as well: half an hour
    python benchmarks/beacon_learning.py --quick --output /tmp/learning   # only to see that it runs

Training: intervals of 16, ratios from 2 upwards (a curriculum: a beacon of a model this small must first learn to carry
two tokens). Three steps of four hold documents with a key of one digit, whose loss is that of the answer alone; every
fourth holds texts of Python's library. The base is frozen.

Judging, on files that no training showed and with seeds of its own (ten digits are too few to keep some back):
- retrieval: whether the digit is the likeliest token, over documents whose key stands outside the last 128 tokens.
  Guessing among ten digits finds 0.10.
- text: mean loss in nats of the second half of each text.
- beside it the same base with a sliding window of its 128 tokens (full positions, so that layers pass on what the
  layers below saw), and with blocks of 16 tokens: what it has of a text when nothing is remembered.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from common import about, arguments, canvas, machine, markdown, places, save

QUICKSTART = Path(__file__).parent.parent / "example_configs" / "quickstart"
BASE = QUICKSTART / "base"
WINDOW, INTERVAL = 128, 16
LENGTHS = [256, 512, 1024, 1792]
# (share of the steps, ratios, lengths of the documents)
CURRICULUM = [
    (0.55, [2], [96, 128, 160]),
    (0.75, [2, 4], [128, 192, 256]),
    (1.0, [2, 4, 8, 16], [192, 256, 384]),
]
RUNS: dict[str, dict[str, Any]] = {
    "beacons": {},
    "segmentation": {"mask": "segmentation"},
    "full coverage": {"mask": "full"},
    "ratio per instance": {"train_ratio": "instance"},
    "ratio fixed at 4": {"train_ratio": 4},
}


def documents() -> Any:
    """The quick start's texts and passkey documents."""
    sys.path.insert(0, str(QUICKSTART))
    import corpus

    return corpus


class Data:
    """Draws documents of an exact length."""

    def __init__(self, tokenizer: Any, judging: bool) -> None:
        corpus = documents()
        self.tokenizer, self.corpus = tokenizer, corpus
        self.keys = corpus.PasskeyMaker(tokenizer, judging=judging)
        files = corpus.JUDGING_FILES if judging else corpus.TRAINING_FILES
        tokenizer.model_max_length = 10**9
        self.texts = corpus.tokenise(tokenizer, corpus.read_texts(files))

    def text(self, length: int, rng: random.Random) -> list[int]:
        return self.corpus.text_document(self.texts, length, rng)

    def passkey(self, length: int, rng: random.Random, outside: int = 0) -> tuple[list[int], int]:
        """Ids, (length,), and the index of the answer; the key stands before the last `outside` tokens or so."""
        depth = rng.random() * max(0.0, 1 - 1.5 * outside / length)
        made = self.keys.builder.document(length - 1, depth, rng.choice(self.keys.keys)[:1])
        return [*made.input_ids, self.tokenizer.eos_token_id], made.answer_start


def train(steps: int, seed: int, rate: float = 3e-3, tokens: int = 4096, **changes: Any) -> tuple[Any, list[float]]:
    """A PEFT model, and the loss of each passkey step."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pose_plugin.beacon import BeaconConfig, check_beacon_gradients, find_tuner, set_ratio_step

    data, rng = Data(AutoTokenizer.from_pretrained(BASE), judging=False), random.Random(seed)
    base = AutoModelForCausalLM.from_pretrained(BASE)
    model: Any = get_peft_model(base, BeaconConfig(interval=INTERVAL, headroom=0, seed=seed, **changes)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 10) * (1 - s / steps))
    losses = []
    for step in range(steps):
        set_ratio_step(model, step)
        _, ratios, lengths = next(part for part in CURRICULUM if step < part[0] * steps)
        find_tuner(model).active_config.ratios = ratios
        length = rng.choice(lengths)
        rows = max(1, tokens // length)
        if step % 4 == 3:
            ids = torch.tensor([data.text(length, rng) for _ in range(rows)])
            labels = ids
        else:
            made = [data.passkey(length, rng) for _ in range(rows)]
            ids = torch.tensor([row for row, _ in made])
            labels = torch.full_like(ids, -100)
            for at, (_, answer) in enumerate(made):
                labels[at, answer - 1 :] = ids[at, answer - 1 :]
        loss = model(ids, labels=labels).loss
        loss.backward()
        if step == 0:
            check_beacon_gradients(model)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 4 != 3:
            losses.append(float(loss))
        if step % 50 == 49:
            print(f"  step {step + 1}: answer loss {sum(losses[-30:]) / len(losses[-30:]):.3f}", flush=True)
    find_tuner(model).active_config.ratios = [2, 4, 8, 16]
    return model.eval(), losses


def judge(model: Any, seed: int, lengths: list[int], trials: int, texts: int) -> dict[str, Any]:
    """Retrieval and loss by length: with beacons, a sliding window, and blocks of one interval."""
    import torch
    from torch.nn import functional as F
    from transformers import AutoTokenizer

    data = Data(AutoTokenizer.from_pretrained(BASE), judging=True)

    def seen(length: int, sliding: bool) -> Any:
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        near = key > query - WINDOW if sliding else key // INTERVAL == query // INTERVAL
        return ((key <= query) & near)[None, None]

    def logits(ids: torch.Tensor, reader: str) -> torch.Tensor:
        if reader == "beacons":
            return model(ids, use_cache=False).logits[0]
        with model.disable_adapter():
            mask = seen(ids.shape[1], reader == "sliding window")
            return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]

    found: dict[str, Any] = {r: {"retrieval": {}, "text": {}} for r in ("beacons", "sliding window", "blocks")}
    with torch.no_grad():
        for length in lengths:
            rng = random.Random(f"{seed} {length}")
            made = [data.passkey(length, rng, outside=WINDOW) for _ in range(trials)]
            pieces = [torch.tensor([data.text(length, rng)]) for _ in range(texts)]
            for reader, row in found.items():
                hits = [int(logits(torch.tensor([ids]), reader)[at - 1].argmax()) == ids[at] for ids, at in made]
                row["retrieval"][str(length)] = sum(hits) / len(hits)
                half = length // 2
                loss = [F.cross_entropy(logits(ids, reader)[half:-1], ids[0, half + 1 :]).item() for ids in pieces]
                row["text"][str(length)] = round(sum(loss) / len(loss), 4)
    return found


def short_inputs_are_the_bases(model: Any) -> bool:
    """Whether a text of one interval gets exactly the base's logits."""
    import torch

    ids = torch.arange(10, 10 + INTERVAL)[None]
    with torch.no_grad():
        ours = model(ids, use_cache=False).logits
        with model.disable_adapter():
            return bool(torch.equal(ours, model(input_ids=ids, use_cache=False).logits))


def table(result: dict[str, Any]) -> str:
    """Retrieval and loss by length; means over the seeds."""
    lengths = result["lengths"]
    header = [
        "",
        *(f"digit, {n} ({n / WINDOW:g}x)" for n in lengths),
        *(f"loss, {n}" for n in lengths),
    ]
    rows = []
    first = next(iter(result["runs"].values()))
    for name, run in result["runs"].items():
        rows.append(_line(name, [each["beacons"] for each in run], lengths))
    for reader in ("sliding window", "blocks"):
        rows.append(_line(reader, [each[reader] for each in first], lengths))
    return markdown(header, rows) + "\n\n" + about(result["machine"])


def _line(name: str, rows: list[dict[str, Any]], lengths: list[int]) -> list[str]:
    def mean(key: str, length: int) -> float:
        return sum(row[key][str(length)] for row in rows) / len(rows)

    return [name, *(f"{mean('retrieval', n):.2f}" for n in lengths), *(f"{mean('text', n):.2f}" for n in lengths)]


def draw(result: dict[str, Any], path: Path) -> None:
    from pose_plugin.evaluation.figures import COLOURS

    first = next(iter(result["runs"].values()))
    lengths = result["lengths"]
    panels = {"retrieval": "digit found, key outside the window", "text": "loss of texts (nats)"}
    with canvas(path, 6.6, 2.9, columns=2) as (figure, grid):
        for axes, (key, label) in zip(grid, panels.items(), strict=True):
            for side, reader in enumerate(("beacons", "sliding window", "blocks")):
                values = [sum(run[reader][key][str(n)] for run in first) / len(first) for n in lengths]
                axes.plot(lengths, values, marker="o", color=COLOURS[side], label=reader)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{n}\n{n / WINDOW:g}x" for n in lengths])
            axes.set_xlabel("text, tokens")
            axes.set_ylabel(label)
        grid[0].axhline(0.1, color="grey", linestyle=":", linewidth=1)
        grid[0].set_ylim(-0.03, 1.03)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ablation", action="store_true", help="the three masks and the three ways to draw ratios")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    results, figures = places(args.output)
    steps, trials, texts, lengths = args.steps, 100, 8, LENGTHS
    if args.quick:
        steps, trials, texts, lengths = 4, 2, 1, [256, 512]
    runs: dict[str, list[Any]] = {}
    # Seeds from 10 on: those below were used to choose the settings.
    seeds = [10 + seed for seed in range(args.seeds)]
    for name, changes in RUNS.items():
        if name != "beacons" and not args.ablation:
            continue
        for seed in seeds:
            print(f"{name}, seed {seed}", flush=True)
            start = time.process_time()
            model, losses = train(steps, seed, tokens=512 if args.quick else 4096, **changes)
            spent = time.process_time() - start
            measured = judge(model, seed, lengths, trials, texts)
            measured["training_seconds"] = round(spent)
            measured["answer_loss"] = [round(sum(part) / len(part), 3) for part in (losses[:30], losses[-30:])]
            measured["short_inputs_identical"] = short_inputs_are_the_bases(model)
            runs.setdefault(name, []).append(measured)
    result = {
        "machine": machine("torch", "transformers", "peft"),
        "window": WINDOW,
        "interval": INTERVAL,
        "steps": steps,
        "trials": trials,
        "texts": texts,
        "seeds": seeds,
        "lengths": lengths,
        "runs": runs,
    }
    save(result, results / "beacon_learning.json")
    draw(result, figures / "beacon_learning.png")
    print(table(result))


if __name__ == "__main__":
    main()
