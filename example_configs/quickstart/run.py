"""The quick start: extend the tiny base model 16 times with Axolotl and show that it worked.

    make demo                                     # or, in an environment with Axolotl:
    python example_configs/quickstart/run.py
    python example_configs/quickstart/run.py --seed 1 --output outputs/second

It trains pose.yaml, and for comparison the same with `sampler: none` (no skip) and `sampler: randpos`. It evaluates
these models, the base model, and the base model with an extended but untrained RoPE. It writes a table, JSON, CSV and
pictures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LENGTHS = [128, 256, 512, 1024, 2048]
# Each training run, and how its YAML differs from pose.yaml.
RUNS: dict[str, dict[str, Any]] = {
    "PoSE": {},
    "no skip": {"pose": {"sampler": "none", "content": "window"}},
    "RandPos": {"pose": {"sampler": "randpos", "content": "window"}},
}
Source = tuple[str, str, dict[str, Any] | None]
"""A model to judge: name, folder, and the `rope` that extends it without training, if any."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled",
}


def folder_of(name: str, output: Path) -> Path:
    return output / name.replace(" ", "-").lower()


def write_config(name: str, changes: dict[str, Any], output: Path, seed: int, steps: int | None) -> Path:
    """Write pose.yaml with the run's changes, seed and folders, and return the file."""
    import yaml

    config = yaml.safe_load((HERE / "pose.yaml").read_text(encoding="utf-8"))
    config["base_model"] = str(HERE / "base")
    config["datasets"][0]["path"] = str(output / "data" / "train.jsonl")
    config |= {**changes, "pose": {**config["pose"], "seed": seed, **changes.get("pose", {})}}
    config["seed"] = 42 + seed
    folder = folder_of(name, output)
    config["output_dir"] = str(folder)
    config["dataset_prepared_path"] = str(folder / "prepared")
    folder.mkdir(parents=True, exist_ok=True)
    if steps is not None:
        config["max_steps"] = steps
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def command(arguments: list[str], log: Path) -> None:
    """Run a command with its output in `log`; if it fails, show the end of the log."""
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(arguments, stdout=file, stderr=subprocess.STDOUT, env=os.environ | QUIET).returncode
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{' '.join(arguments)} failed with code {code}. The end of {log}:\n{tail}")


def train(config: Path) -> None:
    command(
        [sys.executable, "-m", "axolotl.cli.main", "train", str(config), "--launcher", "python"],
        config.with_name("train.log"),
    )


def judge(sources: list[Source], output: Path, trials: int, seed: int, lengths: list[int] = LENGTHS) -> list[Any]:
    """Measure passkey and perplexity by length of each model, and return one `ModelResult` per model."""
    # Keep the libraries' messages out of the lines of `timed`; errors still come back as exceptions.
    with (output / "judge.log").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 2)

    import torch

    from pose_plugin.checkpoints.load import describe, extended, load
    from pose_plugin.evaluation.measures.passkey import passkey
    from pose_plugin.evaluation.measures.perplexity import perplexity
    from pose_plugin.evaluation.results import ModelResult

    torch.set_num_threads(1)
    texts = [(output / "data" / "judge.txt").read_text(encoding="utf-8")]
    results = []
    for name, folder, rope in sources:
        source = describe(folder, name)
        if rope:
            source = extended(source, lengths[-1], rope, name)
        model = load(source)
        # Seeds of evaluation start far from those of training, so that no document occurs in both.
        keys = passkey(model, source.tokenizer, lengths, trials=trials, seed=1000 + seed, progress=False)
        loss = perplexity(model, source.tokenizer, texts, lengths, max_tokens=16384, progress=False)
        results.append(ModelResult(name, {result.measure: result for result in (keys, loss)}, facts=source.facts))
    return results


def timed(what: str, step: Callable[..., Any], *arguments: Any) -> Any:
    begin = time.monotonic()
    print(f"… {what}", flush=True)
    result = step(*arguments)
    print(f"✓ {what} ({time.monotonic() - begin:.0f} s)", flush=True)
    return result


def run(
    output: Path,
    seed: int = 0,
    trials: int = 50,
    jobs: int = 2,
    steps: int | None = None,
    runs: dict[str, dict[str, Any]] = RUNS,
) -> Any:
    """Train `runs`, evaluate them and the base, and print, write and return the `Report`."""
    from pose_plugin.evaluation.figures import draw
    from pose_plugin.evaluation.report import markdown, write
    from pose_plugin.evaluation.results import Report

    os.environ.update(QUIET)
    output.mkdir(parents=True, exist_ok=True)
    data = [sys.executable, str(HERE / "make_data.py"), "--out", str(output / "data"), "--seed", str(seed)]
    timed("training and evaluation documents", command, data, output / "data.log")
    base = str(HERE / "base")
    # Each evaluation runs in its own process, so that models do not wait for each other.
    with ThreadPoolExecutor(jobs) as pool, ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as judges:

        def judged(sources: list[Source]) -> list[Any]:
            return judges.submit(judge, sources, output, trials, seed).result()

        def learn(name: str) -> list[Any]:
            timed(f"axolotl train, {name}", train, write_config(name, runs[name], output, seed, steps))
            return timed(f"evaluate {name}", judged, [(name, str(folder_of(name, output)), None)])

        untrained: list[Source] = [("original", base, None), ("RoPE only", base, {"type": "linear"})]
        before = pool.submit(timed, "evaluate the base model", judged, untrained)
        after = [pool.submit(learn, name) for name in runs]
        report = Report([m for part in (before, *after) for m in part.result()], train_length=128, target_length=2048)
    pictures = draw(report, output)
    files = [*write(report, output, pictures), *(picture.png for picture in pictures)]
    print(f"\n{markdown(report)}\nThe extended model is in {folder_of('PoSE', output)}")
    print("\n".join(f"  {file}" for file in files))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=0, help="of data, positions, order and evaluation")
    parser.add_argument("--trials", type=int, default=50, help="passkey prompts per length")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, one core each")
    parser.add_argument("--steps", type=int, help="stop each run early; default: the 600 steps of pose.yaml")
    args = parser.parse_args()
    run(args.output, args.seed, args.trials, args.jobs, args.steps)


if __name__ == "__main__":
    main()
