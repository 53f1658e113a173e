"""Train beacons on SmolLM2-135M-Instruct, and judge whether their memory is worth something: hours of one core.

    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py pilot     # ten minutes: is there anything to gain?
    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py train     # about two hours; run it again to resume
    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py judge     # also before training ends: what it has learned
    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py train --kept     # sinks and overlap; then judge --kept
    python benchmarks/beacon_smollm2.py train --quick               # the tiny model, two steps; then judge --quick

Model and texts come from the Python package index (benchmarks/smollm2/get.py). The checkpoint is in
outputs/beacon_smollm2; the pilot and the judging replace their own numbers in results/beacon_smollm2.json.

- Geometry: window 512 and interval 128, a quarter of the window as in the paper; ratios 2, 4, 8, 16. With --kept,
  the first 4 tokens of a text and the last 32 of each interval stay in the window uncondensed.
- Training: 700 rows of 1,024 tokens of Shakespeare's plays, one per step. The loss is the mean over all tokens.
- Judging: second halves of pieces of 2,048 tokens of a report, a novel and a manual, none of which is trained.
- Go on after the pilot only if full attention is at least 0.05 nats better than a sliding window of 512 tokens.
  Otherwise memory has nothing to gain.
- Success: own memory beats another text's by at least 0.02 nats, with an interval over the texts that excludes zero.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from beacon_judging import Alone, Beacons, Sliding
from beacon_training import BASE, token_losses
from common import about, arguments, machine, markdown, places, save
from recall import data, texts

WINDOW, INTERVAL, RATIOS, TRAINED, JUDGED = 512, 128, [2, 4, 8, 16], 1024, 2048
ROWS, RATE, PIECES, SAVE_EVERY, SEED = 700, 5e-4, 12, 20, 42
ROOM, GAIN = 0.05, 0.02
KEPT = {"sinks": 4, "overlap": 32}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("pilot", "train", "judge"))
    parser.add_argument("--kept", action="store_true", help="keep sinks and an overlap uncondensed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder, kept = args.output or Path("outputs/beacon_smollm2"), KEPT if args.kept else {}
    folder = folder / "kept" if kept else folder
    folder.mkdir(parents=True, exist_ok=True)
    if args.part == "train":
        train(folder, args.quick, kept)
        return
    path = places(args.output)[0] / "beacon_smollm2.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"window": WINDOW, "interval": INTERVAL, "tokens": JUDGED}
    found = pilot(args.quick) if args.part == "pilot" else judge(folder, args.quick, kept)
    part = f"{args.part}, kept" if kept and args.part == "judge" else args.part
    result[part] = found | {"machine": machine("torch", "transformers", "peft")}
    save(result, path)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return the loss of each reader, for all tokens and by offset in the interval."""
    readers, parts = {}, [part for part in ("pilot", "judge", "judge, kept") if part in result]
    for part in parts:
        note = ", with sinks and overlap" if part == "judge, kept" else ""
        readers |= {name + note: row for name, row in result[part]["readers"].items()}
    offsets = list(next(iter(readers.values()))["by offset"])
    rows = [
        [name, f"{row['mean']:.3f}", *(f"{row['by offset'][offset]:.3f}" for offset in offsets)]
        for name, row in readers.items()
    ]
    header = ["nats per token", "all tokens", *(f"offset {offset}" for offset in offsets)]
    return markdown(header, rows) + "\n\n" + about(result[parts[-1]]["machine"])


def pilot(quick: bool) -> dict[str, Any]:
    """Judge the untrained base: full attention, sliding windows, and intervals without memory."""
    base, pieces = load(quick)[0], judged(quick)
    readers = {
        "full attention": Sliding(base, JUDGED),
        "sliding window": Sliding(base, WINDOW),
        "sliding window, 4 sinks": Sliding(base, WINDOW, sinks=4),
        "no memory": Alone(base, INTERVAL),
    }
    found = report(readers, pieces)
    return {"readers": found} | compared("full attention", "sliding window", found, ROOM)


def train(folder: Path, quick: bool, kept: dict[str, int]) -> None:
    """Train, or continue where the last run was interrupted."""
    from pose_plugin.beacon import find_tuner, set_ratio_step

    model = beacons(*load(quick), **kept).train()
    rows, steps = training_rows(quick), 2 if quick else ROWS
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 20) * (1 - s / steps))
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        for parameter, value in zip(parameters, state["parameters"], strict=True):
            parameter.data.copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    start = time.time()
    for step in range(first, steps):
        # Rows and ratios depend on the step alone, so an interrupted run continues as it would have gone on.
        play = random.Random(f"{SEED} {step}").choice(rows)
        at = random.Random(f"{SEED} {step} at").randrange(len(play) - TRAINED)
        ids = torch.tensor([play[at : at + TRAINED]])
        set_ratio_step(model, step)
        loss = token_losses(model(ids).logits, ids).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step + 1}: {float(loss.detach()):.3f}, {time.time() - start:.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            part = checkpoint.with_suffix(".part")
            state = {"step": step + 1, "parameters": [parameter.data for parameter in parameters]}
            torch.save(state | {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, part)
            part.replace(checkpoint)
    assert find_tuner(model).condensed_since_step or first == steps
    model.save_pretrained(str(folder / "adapter"))


def judge(folder: Path, quick: bool, kept: dict[str, int]) -> dict[str, Any]:
    """Compare own memory with another text's, and with the base that has none or a sliding window."""
    model, rows = restored(folder, quick, kept)
    readers: dict[str, Any] = {"own memory": Beacons(model), "another text's memory": Beacons(model, another=True)}
    if kept:
        readers["no memory"] = Alone(load(quick)[0], INTERVAL, kept["overlap"], kept["sinks"])
    found = report(readers, judged(quick))
    return {"rows": rows, "readers": found} | compared("own memory", "another text's memory", found, GAIN)


def restored(folder: Path, quick: bool, kept: dict[str, int]) -> tuple[Any, int]:
    """Return the beacons of the last checkpoint, and how many rows they have read."""
    if not (folder / "checkpoint.pt").exists():
        raise SystemExit(f"{folder} has no checkpoint.pt: first run benchmarks/beacon_smollm2.py train")
    model, state = beacons(*load(quick), **kept), torch.load(folder / "checkpoint.pt")
    for parameter, value in zip(trained(model), state["parameters"], strict=True):
        parameter.data.copy_(value)
    return model.eval(), state["step"]


def compared(better: str, worse: str, found: dict[str, Any], least: float) -> dict[str, Any]:
    """Return how much better one reader is, with an interval that a bootstrap over the pieces gives (95 %)."""
    gains = [b - a for a, b in zip(found[better]["pieces"], found[worse]["pieces"], strict=True)]
    draw = random.Random(SEED)
    means = sorted(sum(draw.choices(gains, k=len(gains))) / len(gains) for _ in range(2000))
    mean, low, high = sum(gains) / len(gains), means[50], means[-51]
    verdict = {"gain": mean, "low": low, "high": high, "wanted": least, "success": mean >= least and low > 0}
    print(f"{better} against {worse}: {mean:+.4f} nats ({low:+.4f} to {high:+.4f}), wanted {least}")
    return verdict


def report(readers: dict[str, Any], pieces: torch.Tensor) -> dict[str, Any]:
    """Return the loss of each reader: its mean, by piece, and by offset in the interval."""
    result, offset = {}, torch.arange(pieces.shape[1] // 2 - 1, pieces.shape[1] - 1) % INTERVAL
    for name, reader in readers.items():
        # With another text's memory, pairs are read together; more would need too much memory.
        each = torch.cat([reader.second_half(part) for part in pieces.split(2 if getattr(reader, "another", 0) else 1)])
        parts = {f"{a}–{b - 1}": (offset >= a) & (offset < b) for a, b in ((0, 4), (4, 16), (16, 64), (64, 128))}
        result[name] = {
            "mean": round(float(each.mean()), 4),
            "pieces": [round(value, 4) for value in each.mean(1).tolist()],
            "by offset": {label: round(float(each[:, inside].mean()), 4) for label, inside in parts.items()},
        }
        print(f"{name}: {result[name]['mean']:.4f} nats; {result[name]['by offset']}", flush=True)
    return result


def load(quick: bool) -> tuple[Any, Any]:
    """Return the base in bf16 and its tokenizer."""
    if not quick:
        return texts.base(dtype="bfloat16")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(BASE).eval(), AutoTokenizer.from_pretrained(BASE)


def beacons(base: Any, tokenizer: Any, **kept: int) -> Any:
    from peft import get_peft_model

    from pose_plugin.beacon import BeaconConfig

    limit = min(WINDOW, base.config.max_position_embeddings)
    kept = {key: min(value, limit // 16) for key, value in kept.items()}
    sizes = {"interval": limit // 4, "window": limit, "headroom": 0, **kept}
    config = BeaconConfig(ratios=RATIOS, dtype="float32", seed=SEED, **sizes)
    return get_peft_model(base, config)


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def training_rows(quick: bool) -> list[list[int]]:
    """Return the token ids of each play."""
    tokenizer = load(quick)[1]
    if quick:
        return [list(range(3, 300)) * 5]
    return [list(play) for play in data.read_plays(tokenizer, texts.FOLDER)]


def judged(quick: bool) -> torch.Tensor:
    """Return pieces of the judged texts, in turns, (pieces, tokens)."""
    if quick:
        return torch.arange(3, 3 + 2 * 256).remainder(400).view(2, 256) + 3
    tokenizer, draw, pieces = load(quick)[1], random.Random(SEED), []
    found = [texts.ids(tokenizer, name) for name in texts.JUDGED]
    for number in range(PIECES):
        ids = found[number % len(found)]
        start = draw.randrange(len(ids) - JUDGED)
        pieces.append(ids[start : start + JUDGED])
    return torch.tensor(pieces)


if __name__ == "__main__":
    sys.exit(main())
