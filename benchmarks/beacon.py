"""Memory and time of reading a long text: Activation Beacon against full attention, in one run.

    OMP_NUM_THREADS=1 python benchmarks/beacon.py                       # the tiny model: two minutes of one core
    OMP_NUM_THREADS=1 python benchmarks/beacon.py --smollm2 FOLDER      # SmolLM2-135M too
    python benchmarks/beacon.py --quick --output /tmp/beacon            # only checks that it runs

Random tokens, 4 to 64 times the window, are read once, with an interval of 128 and the smallest ratio that fits
(`adapt`). FOLDER holds SmolLM2-135M-Instruct as a Hugging Face folder or a .gguf file. Its window of 8192 is set to
512 here, so that one core can read 64 times as much: that takes 20 minutes. Nothing is trained, since cost does not
depend on the weights.

- Each measurement runs in its own process, with one thread. Time is processor time. Memory is the peak of the resident
  set minus its size after the model has read a first short text.
- `cache_megabytes` is the size of the cache after reading.

Claims are ratios within one run: seconds and megabytes are this machine's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import about, arguments, canvas, machine, markdown, places, save
from step_cost import _forget_peak, _resident

BASE = Path(__file__).parent.parent / "example_configs" / "quickstart" / "base"
INTERVAL = 128
FACTORS: tuple[int, ...] = (4, 8, 16, 32, 64)
METHODS = {"beacon": "Activation Beacon", "full": "full attention"}
TINY, REAL = "tiny", "SmolLM2-135M"
# With a window of four intervals, as in the paper, and with a shorter one.
TINY_WINDOWS, REAL_WINDOW = (256, 512), 512


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--smollm2", type=Path, help="folder with SmolLM2-135M-Instruct, or its .gguf file")
    parser.add_argument("--case", help="measure one configuration in this process, e.g. tiny:512:beacon:4")
    args = parser.parse_args()
    if args.case:
        model, window, method, factor = args.case.split(":")
        print(json.dumps(measure(args.smollm2 if model == REAL else BASE, int(window), method, int(factor))))
        return
    results, figures = places(args.output)
    factors = FACTORS[:1] if args.quick else FACTORS
    models = [(TINY, window) for window in TINY_WINDOWS] + ([(REAL, REAL_WINDOW)] if args.smollm2 else [])
    cases = []
    for model, window in models:
        for factor in factors:
            for method in METHODS:
                case = _in_a_fresh_process(f"{model}:{window}:{method}:{factor}", args.smollm2)
                cases.append({"model": model, "window": window, "method": method, "factor": factor, **case})
                cost = f"{case['seconds']:.2f} s, {case['megabytes']:.0f} MB"
                print(f"{model} {window} {method} {factor}x: {cost}", flush=True)
    result = {"machine": machine("torch", "transformers", "peft"), "interval": INTERVAL, "cases": cases}
    save(result, results / "beacon_cost.json")
    draw(result, figures / "beacon_cost.png")
    print(table(result))


def measure(source: Path, window: int, method: str, factor: int) -> dict[str, Any]:
    """Read one text in this process and return its cost."""
    import torch
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from pose_plugin import BeaconConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = window * factor
    given = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
    place = source.parent if given else source
    config = AutoConfig.from_pretrained(place, **given)
    # Full attention reads beyond the window; only its cost matters here, not its output.
    config.max_position_embeddings = max(window, tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(place, config=config, dtype=torch.float32, **given).eval()
    if method == "beacon":
        model = get_peft_model(model, BeaconConfig(interval=INTERVAL, window=window, headroom=0)).eval()
    ids = torch.randint(0, config.vocab_size, (1, tokens))

    def read(text: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(input_ids=text, use_cache=True, logits_to_keep=1).past_key_values

    read(ids[:, : window + INTERVAL])  # longer than the window, so that something is condensed
    before = _resident("VmRSS")
    _forget_peak()
    start = time.process_time()
    cache = read(ids)
    seconds, peak = time.process_time() - start, _resident("VmHWM")
    if cache.get_seq_length() != tokens:
        raise SystemExit(f"{method} {factor}x: the cache has seen {cache.get_seq_length()} of {tokens} tokens")
    size = (
        cache.nbytes()
        if method == "beacon"
        else sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    )
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "megabytes": round((peak - before) / 1e6, 1),
        "cache_megabytes": round(size / 1e6, 2),
        "ratio": cache.ratios[0] if method == "beacon" else None,
    }


def table(result: dict[str, Any]) -> str:
    """Return a table of growth: each column as a multiple of its value at the shortest length, and the two divided."""
    cases = {(named(c), c["method"], c["factor"]): c for c in result["cases"]}
    rows = []
    for model in dict.fromkeys(named(c) for c in result["cases"]):
        factors = sorted({f for m, _, f in cases if m == model})
        for factor in factors:
            beacon, full = cases[model, "beacon", factor], cases.get((model, "full", factor))
            first = {method: cases[model, method, factors[0]] for method in METHODS}
            row = [f"{model}: {factor}x ({beacon['tokens']})", str(beacon["ratio"])]
            for key in ("seconds", "cache_megabytes"):
                row += [
                    f"{beacon[key] / first['beacon'][key]:.1f}",
                    f"{full[key] / first['full'][key]:.1f}" if full else "–",
                    f"{full[key] / beacon[key]:.1f}" if full else "–",
                ]
            rows.append(row)
    header = [
        "text (tokens)", "α", "time, beacon", "time, full", "full : beacon",
        "cache, beacon", "cache, full", "full : beacon",
    ]  # fmt: skip
    return markdown(header, rows) + "\n\n" + about(result["machine"])


def named(case: dict[str, Any]) -> str:
    """Return the label of a model with its window."""
    return f"{case['model']}, window {case['window']}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw time and peak memory by length, one pair of lines per model."""
    from pose_plugin.utils.plots import COLOURS

    models = list(dict.fromkeys(named(c) for c in result["cases"]))
    panels = {"seconds": "processor time (s)", "megabytes": "memory without the model (MB)"}
    with canvas(path, 6.6, 3.0, columns=2) as (figure, grid):
        for axes, (key, label) in zip(grid, panels.items(), strict=True):
            for side, (method, name) in enumerate(METHODS.items()):
                for model, style in zip(models, (":", "-", "--"), strict=False):
                    points = [c for c in result["cases"] if (named(c), c["method"]) == (model, method)]
                    axes.plot(
                        [c["factor"] for c in points],
                        [max(c[key], 0.01) for c in points],
                        style,
                        marker="o",
                        markersize=3.5,
                        color=COLOURS[side],
                        label=f"{name}, {model}",
                    )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(FACTORS, [f"{f}x" for f in FACTORS])
            axes.set_xlabel("length of the text, in windows")
            axes.set_ylabel(label)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)


def _in_a_fresh_process(case: str, smollm2: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", case]
    command += ["--smollm2", str(smollm2)] if smollm2 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}: the measuring process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
