"""Run the launch lines of docs/distributed.md on a CPU with a tiny model, and compare each with one process.

    OMP_NUM_THREADS=1 python benchmarks/launchers.py               # every line without a result, about a minute each
    OMP_NUM_THREADS=1 python benchmarks/launchers.py --only trl-zero3,axolotl-zero3 --again
    python benchmarks/launchers.py --table                         # print the table of docs/distributed.md

Each line runs as the page writes it, in a folder with `rows.jsonl`, `config.yaml` and a link to `example_configs`. Two
machines are two launchers on this one. All runs train the same rows in the same steps; what they log and save is
compared. Results go to results/launchers.json after each line, so a stopped run continues where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, about, machine, save

ROOT = Path(__file__).parents[1]
FILE = RESULTS / "launchers.json"
STEPS, ROWS, LENGTH, TARGET = 3, 4, 400, 2048
PORT = "29500"

SCRIPT = (
    "example_configs/trl/sft.py --data rows.jsonl --steps 3 --logging-steps 1 --learning-rate 0.01 --batch-size {batch}"
)
DDP = "accelerate launch --config_file example_configs/accelerate/ddp.yaml --num_processes 2 --mixed_precision no"
MACHINES = "--num_machines 2 --machine_rank {rank} --main_process_ip 127.0.0.1 --main_process_port 29500"
NODES = "torchrun --nnodes 2 --node_rank {rank} --nproc_per_node 2 --master_addr 127.0.0.1 --master_port 29500"
DEEPSPEED = "deepspeed --no_local_rank --num_gpus 2"
TORCHRUN = "--launcher torchrun -- --nproc_per_node=2 --standalone"


class Line(NamedTuple):
    """A launch line.

    Attributes:
        launch: with SCRIPT for the TRL script and its options, and {rank} for the number of the machine.
        processes: that it asks for.
        machines: how many launchers are started.
    """

    launch: str
    processes: int = 2
    machines: int = 1


LINES = {
    "trl": Line("python SCRIPT", 1),
    "trl-ddp": Line(f"{DDP} SCRIPT"),
    "trl-torchrun": Line("torchrun --nproc_per_node 2 --standalone SCRIPT"),
    "trl-zero3": Line(f"{DDP} SCRIPT".replace("ddp.yaml", "zero3.yaml")),
    "trl-deepspeed": Line(f"{DEEPSPEED} SCRIPT --deepspeed example_configs/deepspeed/zero3.json"),
    "trl-zero2": Line(f"{DDP} SCRIPT".replace("ddp.yaml", "zero2.yaml")),
    "trl-fsdp2": Line(f"{DDP} SCRIPT".replace("ddp.yaml", "fsdp2.yaml")),
    "trl-cpu": Line("accelerate launch --cpu --num_processes 2 SCRIPT"),
    "trl-machines": Line(f"{DDP} {MACHINES} SCRIPT".replace("processes 2", "processes 4"), 4, 2),
    "trl-nodes": Line(f"{NODES} SCRIPT", 4, 2),
    "axolotl": Line("axolotl train config.yaml --launcher python", 1),
    "axolotl-ddp": Line(f"{DDP} -m axolotl.cli.train config.yaml"),
    "axolotl-torchrun": Line(f"axolotl train config.yaml {TORCHRUN}"),
    "axolotl-accelerate": Line(f"axolotl train config.yaml --launcher accelerate -- {DDP[18:]}"),
    "axolotl-zero2": Line(f"axolotl train config.yaml --deepspeed example_configs/deepspeed/zero2.json {TORCHRUN}"),
    "axolotl-zero3": Line(f"axolotl train config.yaml --deepspeed example_configs/deepspeed/zero3.json {TORCHRUN}"),
    "axolotl-deepspeed": Line(
        f"{DEEPSPEED} --module axolotl.cli.train config.yaml --deepspeed example_configs/deepspeed/zero3.json"
    ),
    "axolotl-fsdp2": Line(f"axolotl train config.yaml --fsdp-version 2 {TORCHRUN}"),
    "axolotl-bare": Line("axolotl train config.yaml --launcher accelerate -- --num_processes 2"),
    "axolotl-machines": Line(
        f"{DDP} {MACHINES} -m axolotl.cli.train config.yaml".replace("processes 2", "processes 4"), 4, 2
    ),
    "axolotl-nodes": Line(f"{NODES} -m axolotl.cli.train config.yaml", 4, 2),
}
# Of the page's block for FSDP 2, which no option of the command line can express.
FSDP = {"fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LINES), help="names of lines, separated by commas")
    parser.add_argument("--again", action="store_true", help="run lines that have a result, too")
    parser.add_argument("--table", action="store_true", help="print the table of the committed results")
    parser.add_argument("--results", type=Path, default=FILE, help="the file of results")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {"lines": {}}
    if args.table:
        print(table(results))
        return 0
    names = args.only.split(",")
    # What one process does comes first, as the others are compared with it.
    for name in sorted(names, key=lambda each: LINES[each].processes > 1):
        if name in results["lines"] and not args.again:
            continue
        results["lines"][name] = found = measure(name)
        results["machine"] = machine("torch", "transformers", "trl", "accelerate", *_optional("axolotl", "deepspeed"))
        save(results, args.results)
        print(name, json.dumps({key: value for key, value in found.items() if key != "files"}), flush=True)
    return 0


def measure(name: str, ports: int = 3) -> dict[str, Any]:
    """Run a line; return what it logged and saved, and how far its weights are from those of one process.

    Args:
        name: of the line.
        ports: how often to try another port if one is taken.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        line = LINES[name]
        make_home(home, line)
        for _ in range(ports):
            code, output = run(home, line)
            if not port_was_taken(output):
                break
        out = home / "out"
        kept = Path(tempfile.gettempdir()) / f"launchers-{name.partition('-')[0]}"
        if line.processes == 1:
            subprocess.run(["rm", "-rf", str(kept)], check=True)
            out.rename(kept)
            out = kept
        return {"command": line.launch, "code": code, **look(out, output), "distance": _distance(out, kept)}


def make_home(home: Path, line: Line) -> None:
    """Make the folder in which a line runs."""
    (home / "example_configs").symlink_to(ROOT / "example_configs")
    picker = random.Random(0)
    rows = [[picker.randrange(3, 200) for _ in range(LENGTH)] for _ in range(8 * ROWS)]
    # Rows of one length, as Axolotl takes the mean of the ranks' losses instead of that of all tokens.
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * LENGTH, "labels": row}) for row in rows]
    (home / "rows.jsonl").write_text("\n".join(lines) + "\n")
    import yaml

    values = yaml.safe_load((ROOT / "example_configs/quickstart/pose.yaml").read_text())
    values["datasets"][0]["path"] = "rows.jsonl"
    values |= {"micro_batch_size": ROWS // line.processes, "max_steps": STEPS, "logging_steps": 1}
    values |= {"output_dir": "out", "dataset_prepared_path": "prepared"}
    values |= FSDP if "fsdp" in line.launch else {}
    (home / "config.yaml").write_text(yaml.safe_dump(values))


def run(home: Path, line: Line) -> tuple[int, str]:
    """Start a line, on each of its machines; return the first exit status that is not 0, and all output."""
    port = free_port() if line.machines > 1 else PORT
    script = f"{SCRIPT} --output out".format(batch=ROWS // line.processes)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": programs, "CUDA_VISIBLE_DEVICES": ""}
    environment["AXOLOTL_DO_NOT_TRACK"] = "1"
    started = []
    for rank in range(line.machines):
        words = line.launch.replace("SCRIPT", script).replace("{rank}", str(rank)).replace(PORT, port)
        log = (home / f"machine{rank}.log").open("w+")
        process = subprocess.Popen(shlex.split(words), cwd=home, env=environment, stdout=log, stderr=log)
        started.append((process, log))
    code = next((found for process, _ in started if (found := process.wait(timeout=1800))), 0)
    output = ""
    for _, log in started:
        log.seek(0)
        output += log.read()
    return code, output


def free_port() -> str:
    """Return a port that is free now. Another process may take it before the launcher does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def port_was_taken(output: str) -> bool:
    """Return whether a launcher failed because another process listens on its port."""
    return any(words in output for words in ("EADDRINUSE", "ddress already in use", "but another process is utilizing"))


def look(out: Path, output: str) -> dict[str, Any]:
    """Return what a run logged and saved."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    warnings = re.findall(r"((?:WORLD_SIZE|MASTER_ADDR|ACCELERATE_USE_\w+)=[^\n]*?this run has [^\n]*)", plain)
    errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]*Error: [^\n]*)", plain, re.M)
    record = json.loads((out / "pose.json").read_text()) if (out / "pose.json").exists() else {}
    config = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
    return {
        "run": next(iter(re.findall(r"this run: ([^\n]*)", plain)), None),
        "ranks": len(re.findall(r"this process drew \d+ documents", plain)),
        "self_tests": plain.count("self-test passed"),
        "losses": [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", plain)],
        "processes_recorded": record.get("trained", {}).get("processes"),
        "maximum": config.get("max_position_embeddings"),
        "files": sorted(path.name for path in out.iterdir() if path.is_file()) if out.exists() else [],
        "warning": warnings[0] if warnings else None,
        "error": next((e for e in errors if "ChildFailed" not in e and "CalledProcess" not in e), None),
    }


def _distance(out: Path, one: Path) -> float | None:
    """Return the greatest difference of a saved weight from that of one process; None if there is none to compare."""
    from safetensors.torch import load_file

    files = [[load_file(path) for path in sorted(folder.glob("*.safetensors"))] for folder in (out, one)]
    ours, theirs = ({name: value for file in each for name, value in file.items()} for each in files)
    for weights in (ours, theirs):
        # The base's head is its embedding, which DeepSpeed ZeRO-2 saves twice.
        weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight"))
    if None in ours.values() or ours.keys() != theirs.keys():
        return None
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


def _optional(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is not None]


def table(results: dict[str, Any]) -> str:
    """Return the table of the page."""
    rows = ["| launch line | what ran | losses | weights | files |", "|---|---|---|---|---|"]
    for name, line in LINES.items():
        found = results["lines"][name]
        command = line.launch.replace("{rank}", "RANK")
        if found["code"]:
            rows.append(f"| `{command}` | error: {_short(found['error'])} | | | |")
            continue
        ran = found["run"] + (", **with a warning**" if found["warning"] else "")
        losses = " ".join(f"{loss:g}" for loss in found["losses"])
        distance = "not saved" if found["distance"] is None else f"{found['distance']:.0e}"
        complete = found["maximum"] == TARGET and {"pose.json", "model.safetensors"} <= set(found["files"])
        files = f"{len(found['files'])}{'' if complete else ', incomplete'}"
        rows.append(f"| `{command}` | {ran} | {losses} | {'' if line.processes == 1 else distance} | {files} |")
    return "\n".join([*rows, "", about(results["machine"])])


def _short(error: str | None) -> str:
    text = re.sub(r"^[\w.]+\.(\w+Error)", r"\1", (error or "unknown").replace("|", "/"))
    return text if len(text) < 120 else text[:117] + "…"


if __name__ == "__main__":
    sys.exit(main())
