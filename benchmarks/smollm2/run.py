"""A real pretrained model on a CPU: SmolLM2-135M from 8,192 tokens to 16,384 (linear) and to 65,536 (YaRN).

    OMP_NUM_THREADS=1 python benchmarks/smollm2/run.py               # hours of one core; needs Axolotl
    python benchmarks/smollm2/run.py --larger                        # on a GPU: longer, more steps, more retrieval
    python benchmarks/smollm2/run.py --quick --output /tmp/smollm2   # a tiny model, only to see that it runs

Compares the base with both RoPE methods, each in three ways: nothing trained, trained without skips, trained with PoSE,
with the same steps on the same rows. Trains with `axolotl train`, evaluates with `pose-plugin evaluate`, prints every
command, and resumes after an interruption. Writes results/smollm2.json and
docs/figures/smollm2.png (--larger: smollm2_larger).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from common import arguments, machine, places, save  # noqa: E402
from smollm2 import get, tables  # noqa: E402

POSE: dict[str, Any] = {"sampler": "pose", "content": "skip"}
NO_SKIP: dict[str, Any] = {"sampler": "none", "content": "window"}
Command = list[str]


@dataclass(frozen=True)
class Scale:
    """How much is trained and judged. Lengths in tokens; `passkeys` is (lengths, trials) by batch of work."""

    ropes: dict[str, int]
    steps: int
    gaps: tuple[int, ...]
    window: int
    passkeys: tuple[tuple[tuple[int, ...], int], ...]
    topics: tuple[int, ...] = ()
    texts: tuple[str, ...] = get.JUDGED
    dtype: str = "bfloat16"


CPU = Scale(
    ropes={"linear": 16384, "yarn": 65536},
    steps=160,
    gaps=(8192, 12288, 16384, 24576, 32768, 49152, 65536),
    window=16384,
    passkeys=(((2048, 8192), 6), ((12288, 16384), 4)),
)
LARGER = Scale(
    ropes={"linear": 65536, "yarn": 65536},
    steps=600,
    gaps=(8192, 16384, 32768, 65536),
    window=32768,
    passkeys=(((8192, 16384), 20), ((32768, 65536), 10)),
    topics=(16384, 65536),
)
QUICK = replace(CPU, ropes={"yarn": 512}, steps=2, gaps=(256, 512), window=256, passkeys=(((120,), 2),),
                texts=get.JUDGED[:1], dtype="float32")  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--larger", action="store_true", help="the GPU's version")
    parser.add_argument("--work", type=Path, default=Path("outputs/smollm2"), help="model, texts, runs, judgements")
    args = parser.parse_args()
    scale, name = (LARGER, "smollm2_larger") if args.larger else (CPU, "smollm2")
    results, figures = places(args.output)
    # Where the model and the texts are, and where runs and judgements go.
    data = work = args.work
    if args.quick:
        scale, data, work = QUICK, results / "work", results / "work"
        get.pretend(data)
    else:
        get.get(data)
        work = data / "larger" if args.larger else data
        work.mkdir(exist_ok=True)
    for run in runs(scale):
        train(data, work, scale, *run, larger=args.larger)
    done = collect(work, scale, judge(data, work, scale))
    result = {"machine": machine("torch", "transformers", "peft", "axolotl"), **done}
    save(result, results / f"{name}.json")
    tables.draw(result, figures / f"{name}.png")
    print(tables.table(result))


def runs(scale: Scale) -> list[tuple[str, str]]:
    """(rope, method) of everything that is trained."""
    return [(rope, method) for rope in scale.ropes for method in ("pose", "no-skip")]


def train(data: Path, work: Path, scale: Scale, rope: str, method: str, larger: bool = False) -> None:
    """One run of pose.yaml with its rope, sampler and steps, unless the same has been trained."""
    import yaml

    config = yaml.safe_load((HERE / "pose.yaml").read_text(encoding="utf-8"))
    place = work / f"{method}-{rope}"
    config["pose"] |= {"rope": rope, "target_length": scale.ropes[rope], **(POSE if method == "pose" else NO_SKIP)}
    config |= {"base_model": str(data / "model"), "max_steps": scale.steps, "output_dir": str(place)}
    config["datasets"][0]["path"] = str(data / "train.jsonl")
    config["dataset_prepared_path"] = str(work / "prepared")
    if scale.dtype == "float32":
        config["pose"]["train_length"] = 64
    if larger:
        config |= {"bf16": True, "micro_batch_size": 8, "learning_rate": 1.0e-3}
    file = work / f"{method}-{rope}.yaml"
    text = yaml.safe_dump(config, sort_keys=False)
    if (place / "adapter_model.safetensors").exists() and file.exists() and file.read_text(encoding="utf-8") == text:
        return
    file.write_text(text, encoding="utf-8")
    axolotl = [sys.executable, "-m", "axolotl.cli.main", "train", str(file), "--launcher", "python"]
    call(axolotl, work / f"{method}-{rope}.log", f"axolotl train {file}")


def call(command: Command, log: Path, shown: str) -> None:
    """Runs a command with its output in `log`; the log's end is shown if it fails."""
    begin = time.monotonic()
    print(f"$ {shown}", flush=True)
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | quiet).returncode
    if code:
        raise SystemExit(f"it ended with code {code}; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")
    print(f"  {time.monotonic() - begin:.0f} s", flush=True)


def judge(data: Path, work: Path, scale: Scale) -> dict[str, Path]:
    """The report folders by what was measured."""
    texts = {name: str(data / "judge" / f"{name}.txt") for name in scale.texts}
    asked: dict[str, list[str]] = {
        "gap": ["--tasks", "gap", "--lengths", joined(scale.gaps), "--texts", *texts.values()]
    }
    for name, text in texts.items():
        asked[f"loss-{name}"] = [
            *("--tasks", "perplexity", "--lengths", str(scale.window), "--max-windows", "1", "--texts", text)
        ]
    for lengths, trials in scale.passkeys:
        asked[f"passkey-{joined(lengths)}"] = [
            *("--tasks", "passkey", "--lengths", joined(lengths), "--trials", str(trials), "--seed", "1000")
        ]
    if scale.topics:
        asked["topics"] = ["--tasks", "topics", "--lengths", joined(scale.topics), "--trials", "10"]
    models = [str(data / "model"), *(str(work / f"{method}-{rope}") for rope, method in runs(scale))]
    labels = [f"--label=base={models[0]}"] + [
        f"--label={rope}, {tables.METHODS[method]}={place}"
        for (rope, method), place in zip(runs(scale), models[1:], strict=True)
    ]
    stretched = [f"--extend=target_length={target},rope={rope}" for rope, target in scale.ropes.items()]
    places = {}
    for what, options in asked.items():
        places[what] = work / "judged" / what
        command = ["evaluate", *models, *labels, *stretched, *options, "--dtype", scale.dtype, "--quiet",
                   "--no-figures", "--output", str(places[what])]  # fmt: skip
        call(
            [sys.executable, "-m", "pose_plugin", *command],
            work / f"judge-{what}.log",
            shlex.join(["pose-plugin", *command]),
        )
    return places


def joined(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))


def collect(work: Path, scale: Scale, places: dict[str, Path]) -> dict[str, Any]:
    """The reports as one: by model the gap's losses, the losses by position of each text, and the passkeys."""
    from pose_plugin.evaluation.results import Result

    names = {f"base + {rope} (RoPE only)": f"{rope}, RoPE only" for rope in scale.ropes}
    order = ["base", *(f"{rope}, {how}" for rope in scale.ropes for how in ("RoPE only", "no skip", "PoSE"))]
    models: dict[str, Any] = {name: {"gap": {}, "loss": {}, "passkey": {}} for name in order}
    definitions: dict[str, str] = {}
    for what, place in places.items():
        task = what.partition("-")[0]
        measure = {"loss": "perplexity"}.get(task, task)
        for model in json.loads((place / "results.json").read_text(encoding="utf-8"))["models"]:
            row = models[names.get(model["name"], model["name"])]
            found = Result.from_dict(model[measure])
            definitions[measure] = found.described
            scores = {str(n): each.score for n, each in found.by_length().items()}
            if task == "loss":
                buckets = [each.details for each in found.view("position")]
                row["loss"][what.partition("-")[2]] = {str(b["from"]): b["loss"] for b in buckets}
            elif task == "passkey":
                row["passkey"] |= {
                    str(n): {"found": round(each.score * each.n), "trials": each.n}
                    for n, each in found.by_length().items()
                }
            else:
                row[task] = scores
    record = json.loads((work / f"pose-{next(iter(scale.ropes))}" / "pose.json").read_text(encoding="utf-8"))
    return {
        "ropes": scale.ropes, "steps": scale.steps, "window": scale.window, "tokens": record.get("tokens"),
        "texts": list(scale.texts),
        "definitions": definitions, "models": models,
    }  # fmt: skip


if __name__ == "__main__":
    main()
