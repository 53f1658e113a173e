"""Measure what the package itself costs: imports, positions, the collator, a step, the start of a run, evaluation.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py                     # three minutes of one core
    python benchmarks/overhead.py --against ../before                   # the same for another checkout, in turns
    python benchmarks/overhead.py --quick --output /tmp/overhead        # only to see that it runs

Each measurement runs in a separate process with one thread. The processes of two checkouts take turns, so a slow
minute of the machine affects both. Times are processor times, which other programs disturb less than the clock.
A process reports its fastest call, as other programs can only add time. The result is the median over all rounds; a
ratio is the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import about, arguments, machine, markdown, places, save

ROOT = Path(__file__).parent.parent
BASE = ROOT / "example_configs" / "quickstart" / "base"
TARGET, TOKENS = 32768, 2048
# What a reader compares: the first measurement divided by the second.
RATIOS = {
    "positions from an array, Axolotl's / ours": ("positions, Axolotl", "positions, ours, from an array"),
    "positions from a list, Axolotl's / ours": ("positions, Axolotl", "positions, ours, from a list"),
    "a step, with PoSE / plain": ("a step, with PoSE", "a step, plain"),
    "the start of a run, target 1,048,576 / 8,192": ("the start, target 1,048,576", "the start, target 8,192"),
    "passkeys / the forwards that they need": (
        "16 passkeys of 2,048 tokens",
        "16 passkeys of 2,048 tokens, their forwards",
    ),
    "haystacks / the forwards that they need": (
        "4 haystacks of 2,048 tokens, 10 questions each",
        "4 haystacks of 2,048 tokens, their forwards",
    ),
}
# The shape of SmolLM2-135M. What the self-test costs does not depend on the values of the weights.
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 2,
}

_once = False
"""Whether each call is made once, only to see that it runs."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--against", type=Path, help="another checkout of this repository, measured in turns")
    parser.add_argument("--model", default=str(BASE), help="model for the self-test (default: the quick start's)")
    parser.add_argument("--rounds", type=int, default=5, help="processes per measurement and checkout (default 5)")
    parser.add_argument("--case", choices=MEASUREMENTS, help="run one measurement in this process")
    args = parser.parse_args()
    global _once
    _once = args.quick
    if args.case:
        print(json.dumps(MEASUREMENTS[args.case](args.model)))
        return
    trees = {"this checkout": ROOT} | ({"the other checkout": args.against.resolve()} if args.against else {})
    rounds = 1 if args.quick else args.rounds
    runs: dict[str, dict[str, list[float]]] = {tree: {} for tree in trees}
    for turn in range(rounds):
        for case in MEASUREMENTS:
            for tree, folder in trees.items():
                # Processes of their own mostly import; to see that the others run, this one is enough.
                alone = not args.quick or case == "drawing"
                found = _in_a_process(case, args, folder) if alone else MEASUREMENTS[case](args.model)
                for name, seconds in found.items():
                    runs[tree].setdefault(name, []).append(seconds)
            print(f"round {turn + 1} of {rounds}: {case}", flush=True)
    result = {
        "machine": machine("torch", "transformers"),
        # Above the number of cores, measurements compete with other programs.
        "load": round(os.getloadavg()[2], 1),
        "cores": os.cpu_count(),
        "rounds": rounds,
        "model": Path(args.model).name,
        "seconds": {tree: {n: statistics.median(each) for n, each in found.items()} for tree, found in runs.items()},
        "ratios": {name: _ratio(runs["this checkout"], *both) for name, both in RATIOS.items()},
    }
    save(result, places(args.output)[0] / "overhead.json")
    print(table(result))


def imports(model: str) -> dict[str, float]:
    """Processor seconds of `import pose_plugin` and of `pose-plugin --help`, without those of Python itself."""
    bare = _seconds_of("pass")
    # Before `python -m pose_plugin` existed, the command was in pose_plugin.cli.
    command = (
        "import os, runpy, sys, pose_plugin; sys.argv = ['pose-plugin', '--help']; "
        "new = os.path.exists(os.path.join(os.path.dirname(pose_plugin.__file__), '__main__.py')); "
        "runpy.run_module('pose_plugin' if new else 'pose_plugin.cli', run_name='__main__')"
    )
    return {
        "import pose_plugin": _seconds_of("import pose_plugin") - bare,
        "pose-plugin --help": _seconds_of(command) - bare,
    }


def drawing(model: str) -> dict[str, float]:
    """Seconds to draw the positions of a document of 2,048 tokens, with the randomness that belongs to it."""
    import numpy as np

    from pose_plugin.config import PoSESettings
    from pose_plugin.positions import draw_windows

    tokens = [i % 500 for i in range(TOKENS)]
    array = np.array(tokens)
    settings = PoSESettings(target_length=TARGET, train_length=TOKENS)
    calls = {
        "positions, ours, from an array": lambda: draw_windows([array], settings, 0),
        "positions, ours, from a list": lambda: draw_windows([tokens], settings, 0),
    }
    if find_spec("axolotl"):
        from axolotl.utils.trainer import add_pose_position_ids

        sample = {"input_ids": tokens}
        calls["positions, Axolotl"] = lambda: add_pose_position_ids(dict(sample), max_context_len=TARGET)
    return _in_turns(calls, turns=5, times=200)


def collating(model: str) -> dict[str, float]:
    """Seconds per row of 2,048 tokens given as lists."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    from pose_plugin import PoSECollator

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    plain = DataCollatorForSeq2Seq(tokenizer)
    pose = PoSECollator(tokenizer, target_length=TARGET, train_length=TOKENS)
    row = {"input_ids": [i % 500 for i in range(TOKENS)], "labels": [i % 500 for i in range(TOKENS)]}
    row["attention_mask"] = [1] * TOKENS
    found = _in_turns(
        {
            "a row of 2,048 tokens, DataCollatorForSeq2Seq": lambda: plain([dict(row)]),
            "a row of 2,048 tokens, PoSECollator": lambda: pose([dict(row)]),
            "its padding alone": lambda: pose.collate([dict(row)]),
        }
    )
    own = found["a row of 2,048 tokens, PoSECollator"] - found.pop("its padding alone")
    return found | {"a row of 2,048 tokens, PoSECollator without its padding": own}


def stepping(model: str) -> dict[str, float]:
    """Seconds per training step of the quick start's model, 16 rows of 128 tokens: with PoSE and with plain rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

    from pose_plugin import PoSECollator, extend_context

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    plain = AutoModelForCausalLM.from_pretrained(BASE).train()
    pose = AutoModelForCausalLM.from_pretrained(BASE, config=extend_context(plain.config, 2048, "linear")).train()
    rows = [{"input_ids": [(7 * i + j) % 500 for j in range(128)], "labels": [3] * 128} for i in range(16)]
    rows = [row | {"attention_mask": [1] * 128} for row in rows]
    kinds = {
        "a step, plain": (plain, DataCollatorForSeq2Seq(tokenizer)),
        "a step, with PoSE": (pose, PoSECollator(tokenizer, target_length=2048, train_length=128)),
    }

    def step(each: Any, collate: Callable[..., Any]) -> None:
        each(**collate([dict(row) for row in rows])).loss.backward()
        each.zero_grad()

    return _in_turns({name: partial(step, *both) for name, both in kinds.items()}, times=15)


def starting(model: str) -> dict[str, float]:
    """Seconds of all that a run with PoSE does before its first step, for a near and a far target."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from pose_plugin import PoSECollator, extend_context

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    config = AutoModelForCausalLM.from_pretrained(BASE).config
    rows = [{"input_ids": [(7 * i + j) % 500 for j in range(128)]} for i in range(16)]
    calls = {}
    with tempfile.TemporaryDirectory() as folder:
        for target in (8192, 1 << 20):
            trainer = Trainer(
                AutoModelForCausalLM.from_pretrained(BASE, config=extend_context(config, target, "linear")),
                TrainingArguments(folder, report_to=[], use_cpu=True),
                train_dataset=rows,
                data_collator=PoSECollator(tokenizer, target_length=target, train_length=128),
            )
            begin = partial(trainer.pose_callback.on_train_begin, trainer.args, trainer.state, trainer.control)
            calls[f"the start, target {target:,}"] = begin
        return _in_turns(calls, times=2)


def testing(model: str) -> dict[str, float]:
    """Seconds of one self-test, on the given model and on one of SmolLM2-135M's shape with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from pose_plugin import PoSECollator, extend_context, self_test

    torch.set_num_threads(1)
    tokenizer, calls = AutoTokenizer.from_pretrained(BASE), {}
    configs = {"the self-test": AutoConfig.from_pretrained(model)}
    configs |= {"the self-test, SmolLM2-135M's shape": LlamaConfig(**SMOLLM2)}
    for name, config in configs.items():
        window = config.max_position_embeddings
        loaded = AutoModelForCausalLM.from_config(extend_context(config, 4 * window), dtype=torch.float32)
        loaded.config.use_cache = False
        collator = PoSECollator(tokenizer, target_length=4 * window, train_length=window)
        calls[name] = partial(self_test, loaded, collator)
    return _in_turns(calls, times=3)


def evaluating(model: str) -> dict[str, float]:
    """Seconds of retrieval measures at 2,048 tokens, and of the forwards that they need."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pose_plugin.evaluation.measures.haystack import Haystack
    from pose_plugin.evaluation.measures.passkey import Passkey
    from pose_plugin.evaluation.model import read

    torch.set_num_threads(1)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(BASE).eval(), AutoTokenizer.from_pretrained(BASE)
    passkey, texts = Passkey(trials=16, progress=False), [f"Line {i} of a story.\n" * 300 for i in range(4)]
    haystack = Haystack(texts=texts, facts=10, progress=False)
    haystack.prepare(tokenizer, [TOKENS])
    text = haystack._build(TOKENS, 0)
    questions = sum(len(haystack._question(fact.name)) for fact in text.facts)
    steps = haystack.wording.digits + 2

    @torch.no_grad()
    def forwards(rows: int, first: int, then: list[tuple[int, int]]) -> None:
        """Read `rows` texts, then what `then` lists: (rows, tokens) of each forward."""
        cache = None
        for count, length in [(rows, first), *then]:
            ids = torch.full((count, length), 7)
            cache = read(loaded, ids, cache, logits_to_keep=1)[1]

    calls = {
        "16 passkeys of 2,048 tokens": lambda: passkey.measure(loaded, tokenizer, [TOKENS]),
        # Eight texts at a time, and an answer of five digits, the first of which follows the text itself.
        "16 passkeys of 2,048 tokens, their forwards": lambda: [
            forwards(8, TOKENS - 5, [(8, 1)] * 4) for _ in range(2)
        ],
        "4 haystacks of 2,048 tokens, 10 questions each": lambda: haystack.measure(loaded, tokenizer, [TOKENS]),
        "4 haystacks of 2,048 tokens, their forwards": lambda: [
            forwards(1, len(text.ids), [(1, questions), *[(1, len(text.facts))] * (steps - 1)]) for _ in texts
        ],
    }
    return _in_turns(calls, times=2)


MEASUREMENTS: dict[str, Callable[[str], dict[str, float]]] = {
    "imports": imports,
    "drawing": drawing,
    "collating": collating,
    "stepping": stepping,
    "starting": starting,
    "testing": testing,
    "evaluating": evaluating,
}


def table(result: dict[str, Any]) -> str:
    """The measurements as Markdown tables, in milliseconds; with a second checkout, also the ratio of both."""
    trees = list(result["seconds"])
    rows = []
    for name, seconds in result["seconds"][trees[0]].items():
        others = [result["seconds"][tree].get(name) for tree in trees[1:]]
        row = [name, f"{1e3 * seconds:.3f}", *("-" if other is None else f"{1e3 * other:.3f}" for other in others)]
        rows.append([*row, *("-" if other is None else f"{seconds / other:.2f}" for other in others)])
    header = ["measurement", *(f"{tree}, ms" for tree in trees), *("ratio" for _ in trees[1:])]
    ratios = [[name, "-" if ratio is None else f"{ratio:.2f}"] for name, ratio in result["ratios"].items()]
    below = f"Medians of {result['rounds']} rounds. Self-test: {result['model']}. Load {result['load']} on "
    below += f"{result['cores']} cores.\n" + about(result["machine"])
    return "\n\n".join([markdown(header, rows), markdown(["ratio", "median"], ratios), below])


def _ratio(runs: dict[str, list[float]], above: str, below: str) -> float | None:
    """Return the median ratio of two measurements of the same round; None if one was not possible."""
    pairs = zip(runs.get(above, ()), runs.get(below, ()), strict=False)
    ratios = [first / second for first, second in pairs]
    return statistics.median(ratios) if ratios else None


def _in_turns(calls: dict[str, Callable[[], Any]], turns: int = 3, times: int = 50) -> dict[str, float]:
    """The smallest processor time of each call, in seconds; they take turns, so a slow moment affects all."""
    found: dict[str, float] = {}
    for _ in range(1 if _once else turns):
        for name, call in calls.items():
            seconds = _fastest(call, times)
            found[name] = min(seconds, found.get(name, seconds))
    return found


def _fastest(call: Callable[[], Any], times: int = 50) -> float:
    """The smallest processor time of several calls, in seconds. The first call warms up."""
    call()
    seconds = []
    for _ in range(1 if _once else times):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _seconds_of(code: str, times: int = 5) -> float:
    """The smallest processor time of a new Python process that runs the code, in seconds."""
    seconds = []
    for _ in range(1 if _once else times):
        # Not in this folder: Python would look there for the package before PYTHONPATH.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=os.sep)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def _in_a_process(case: str, args: argparse.Namespace, tree: Path) -> dict[str, float]:
    """Run one measurement on the package of a checkout."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tree)}
    command = [sys.executable, __file__, "--case", case, "--model", args.model, *(["--quick"] if args.quick else [])]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode and tree != ROOT:
        # An older checkout may lack what is measured; its cells then show a dash.
        print(f"{case} in {tree}: not measured: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return {}
    if done.returncode:
        raise SystemExit(f"{case} in {tree}: the measuring process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
