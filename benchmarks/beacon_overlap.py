"""Test whether a few raw tokens of the interval before remove the loss behind each border: the tiny model, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/beacon_overlap.py            # three seeds; run it again to resume
    python benchmarks/beacon_overlap.py --quick --output /tmp/overlap

The first tokens of an interval see beacons, but no raw token before them. With `BeaconConfig(overlap=t)`, they also see
the last t tokens of the interval before. The script trains beacons on library texts, as the part `text` of
beacon_learning.py does, and judges them on the same texts: those trained without overlap with each t, and those trained
with an overlap. The same intervals are also read with the same raw tokens and no memory. The sliding windows are those
of beacon_learning.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beacon_training as training
from beacon_judging import OFFSETS, Alone, Beacons, judge
from beacon_learning import LENGTHS, mean
from common import RESULTS, about, arguments, machine, markdown, places, save

UNTRAINED_OVERLAPS, TRAINED_OVERLAPS = (0, 4, 8, 16), (8,)
# With an overlap of 16, the window holds 3,136 tokens at the largest ratio.
LENGTHS = LENGTHS[:3]
STEPS, SEEDS, QUESTIONS, TEXTS = training.KINDS["text"], (10, 11, 12), 100, 16
NAMES = ["", *(f" offset {low}–{high - 1}" for low, high in OFFSETS)]


def main() -> None:
    args = arguments(__doc__).parse_args()
    import torch

    torch.set_num_threads(1)
    path, folder = places(args.output)[0] / "beacon_overlap.json", args.output or Path("outputs/beacon_overlap")
    steps, tokens, texts, seeds, lengths = STEPS, training.STEP_TOKENS, TEXTS, SEEDS, LENGTHS
    if args.quick:
        steps, tokens, texts, seeds, lengths = 2, 512, 2, SEEDS[:1], LENGTHS[:1]
    result = json.loads(path.read_text()) if path.exists() else {"readers": {}}
    result |= {"machine": machine("torch", "transformers", "peft"), "steps": steps, "lengths": lengths}
    for seed in seeds:
        for trained in (0, *TRAINED_OVERLAPS):
            read = UNTRAINED_OVERLAPS if trained == 0 else (trained,)
            names = {t: f"trained with {trained}, read with {t}" for t in read}
            if all(str(seed) in result["readers"].get(name, {}) for name in names.values()):
                continue
            print(f"overlap {trained}, seed {seed}", flush=True)
            model = reader(folder / f"{trained}-{seed}", steps, seed, tokens, trained)
            for t, name in names.items():
                found = judged(model, seed, t, lengths, texts)
                result["readers"].setdefault(name, {})[str(seed)] = found
                save(result, path)
    print(table(result))


def reader(folder: Path, steps: int, seed: int, tokens: int, overlap: int) -> Any:
    """Return trained beacons, from the folder if an interrupted run left them there."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if not folder.exists():
        training.beacons(steps, seed, tokens, "text", overlap=overlap)[0].save_pretrained(str(folder))
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(training.BASE), str(folder)).eval()


def judged(model: Any, seed: int, overlap: int, lengths: list[int], texts: int) -> dict[str, Any]:
    """Return losses of library texts with own and with another text's memory, and the ratio by length."""
    from pose_plugin.beacon import find_tuner

    config = find_tuner(model).active_config
    config.overlap = overlap
    readers = {
        "own": Beacons(model),
        "another": Beacons(model, another=True),
        "alone": Alone(model.get_base_model(), lead=overlap),
    }
    # As many questions as in beacon_learning.py: they are drawn first, and the texts must be the same.
    found = judge(readers, seed, lengths, QUESTIONS, texts, ("text",))
    sizes = config.sizes(training.WINDOW)
    ratios = {str(n): next(r for r in config.ratios if sizes.capacity(r) >= n) for n in lengths}
    return found | {"ratios": ratios}


def table(result: dict[str, Any]) -> str:
    """Return the loss of each reader minus that of others on the same texts, the first also by offset."""
    learning = json.loads((RESULTS / "beacon_learning.json").read_text())
    seeds = [str(each["seed"]) for each in learning["about"]["untrained"]]
    windows = {name: dict(zip(seeds, learning["readers"][name], strict=True)) for name in ("sliding", "half")}
    rows = []
    for reader, runs in result["readers"].items():

        def less(other: Callable[[str], Any], name: str = "", runs: dict[str, Any] = runs) -> str:
            key = f"text{name}"
            gaps = [run["own"][key][n] - other(seed)[key][n] for seed, run in runs.items() for n in run["own"][key]]
            return f"{mean(gaps):+.3f}"

        cells = [less(lambda seed: windows["sliding"][seed], name) for name in NAMES]
        cells.append(less(lambda seed: windows["half"][seed]))
        cells += [less(lambda seed, name=name, runs=runs: runs[seed][name]) for name in ("alone", "another")]
        note = "" if len(runs) >= len(SEEDS) else f" ({len(runs)} seed{'s' if len(runs) > 1 else ''})"
        rows.append([f"{reader}{note}", *cells])
    offsets = [name.strip() for name in NAMES[1:]]
    header = [
        "nats, beacons minus …",
        "sliding window",
        *offsets,
        "sliding window of 64",
        "no memory",
        "another's memory",
    ]
    return markdown(header, rows) + "\n\n" + about(result["machine"])


if __name__ == "__main__":
    main()
