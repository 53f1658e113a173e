"""Train beacons on SmolLM2-135M-Instruct, and judge whether their memory is worth something: hours of one core.

    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py pilot     # ten minutes: is there anything to gain?
    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py train     # about two hours; run it again to resume
    OMP_NUM_THREADS=1 python benchmarks/beacon_smollm2.py judge
    python benchmarks/beacon_smollm2.py train --quick               # the tiny model, two steps; then judge --quick

It has not been run in full yet. Model and texts come from the Python package index (benchmarks/smollm2/get.py).

- Geometry: window 512 and interval 128, a quarter of the window as in the paper; ratios 2, 4, 8, 16.
- Training: 700 rows of 1,024 tokens of Shakespeare's plays, one per step. The loss is the mean over all tokens.
- Judging: second halves of pieces of 2,048 tokens of a report, a novel and a manual, none of which is trained.
- Go on after the pilot only if full attention is at least 0.05 nats better than a sliding window of 512 tokens.
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
from common import arguments
from recall import data, texts

WINDOW, INTERVAL, RATIOS, TRAINED, JUDGED = 512, 128, [2, 4, 8, 16], 1024, 2048
ROWS, RATE, PIECES, SAVE_EVERY, SEED = 700, 5e-4, 12, 20, 42
GAIN = 0.02


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("pilot", "train", "judge"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.output or Path("outputs/beacon_smollm2")
    folder.mkdir(parents=True, exist_ok=True)
    globals()[args.part](folder, args.quick)


def pilot(folder: Path, quick: bool) -> None:
    """Judge the untrained base: full attention, sliding windows, and intervals without memory."""
    base, pieces = load(quick)[0], judged(quick)
    readers = {
        "full attention": Sliding(base, JUDGED),
        "sliding window": Sliding(base, WINDOW),
        "sliding window, 4 sinks": Sliding(base, WINDOW, sinks=4),
        "no memory": Alone(base, INTERVAL),
    }
    report(folder / "pilot.json", readers, pieces)


def train(folder: Path, quick: bool) -> None:
    """Train, or continue where the last run was interrupted."""
    from pose_plugin.beacon import find_tuner, set_ratio_step

    model = beacons(*load(quick)).train()
    rows, steps = training_rows(quick), 2 if quick else ROWS
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 20) * (1 - s / steps))
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        for parameter, value in zip(trained, state["parameters"], strict=True):
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
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step + 1}: {float(loss.detach()):.3f}, {time.time() - start:.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            part = checkpoint.with_suffix(".part")
            state = {"step": step + 1, "parameters": [parameter.data for parameter in trained]}
            torch.save(state | {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, part)
            part.replace(checkpoint)
    assert find_tuner(model).condensed_since_step or first == steps
    model.save_pretrained(str(folder / "adapter"))


def judge(folder: Path, quick: bool) -> None:
    """Compare own memory with another text's, with none, and with a sliding window."""
    from peft import PeftModel

    base, pieces = load(quick)[0], judged(quick)
    untrained = {"sliding window": Sliding(base, WINDOW), "no memory": Alone(base, INTERVAL)}
    found = report(folder / "untrained.json", untrained, pieces)
    model = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    readers = {"own memory": Beacons(model), "another text's memory": Beacons(model, another=True)}
    found |= report(folder / "judged.json", readers, pieces)
    gains = [b - a for a, b in zip(found["own memory"], found["another text's memory"], strict=True)]
    draw = random.Random(SEED)
    means = sorted(sum(draw.choices(gains, k=len(gains))) / len(gains) for _ in range(2000))
    mean, low, high = sum(gains) / len(gains), means[50], means[-51]
    verdict = "success" if mean >= GAIN and low > 0 else "no success"
    print(f"own memory against another text's: {mean:+.4f} nats ({low:+.4f} to {high:+.4f}): {verdict}")


def report(path: Path, readers: dict[str, Any], pieces: torch.Tensor) -> dict[str, list[float]]:
    """Print and save the mean loss of each reader, by piece and by offset in the interval."""
    found, offset = {}, torch.arange(pieces.shape[1] // 2 - 1, pieces.shape[1] - 1) % INTERVAL
    result: dict[str, Any] = {"pieces": list(pieces.shape)}
    for name, reader in readers.items():
        # With another text's memory, pairs are read together; a whole batch would need too much memory.
        each = torch.cat([reader.second_half(part) for part in pieces.split(2)])
        found[name] = each.mean(1).tolist()
        parts = {f"{a}–{b - 1}": (offset >= a) & (offset < b) for a, b in ((0, 4), (4, 16), (16, 64), (64, 128))}
        by_offset = {label: float(each[:, inside].mean()) for label, inside in parts.items() if bool(inside.any())}
        result[name] = {"mean": sum(found[name]) / len(found[name]), "pieces": found[name], "by offset": by_offset}
        print(f"{name}: {result[name]['mean']:.4f} nats; {by_offset}", flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return found


def load(quick: bool) -> tuple[Any, Any]:
    """Return the base in bf16 and its tokenizer."""
    if not quick:
        return texts.base(dtype="bfloat16")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(BASE).eval(), AutoTokenizer.from_pretrained(BASE)


def beacons(base: Any, tokenizer: Any) -> Any:
    from peft import get_peft_model

    from pose_plugin.beacon import BeaconConfig

    limit = min(WINDOW, base.config.max_position_embeddings)
    config = BeaconConfig(interval=limit // 4, window=limit, ratios=RATIOS, dtype="float32", headroom=0, seed=SEED)
    return get_peft_model(base, config)


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
