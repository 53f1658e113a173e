"""TRL trains on the script that `pose-plugin init` writes, as it is."""

from __future__ import annotations

import importlib
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

from pose_plugin.cli.main import main
from tests.forked import forked
from tests.integration.trl_runs import CHAT
from tests.models import make_llama, make_tokenizer

QUESTION, ANSWER, LONG = "w30 w31", "w40 w41", "w50 " * 100
TURNS = [("user", "human", QUESTION), ("assistant", "gpt", ANSWER)] * 2
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "w30 w31 " * 60}],
    "input_ids": [{"input_ids": list(range(30, 90)), "labels": [-100] * 30 + list(range(60, 90))}],
    "instruction": [{"instruction": QUESTION, "input": more, "output": ANSWER} for more in ("", "w60")],
    "messages": [
        {"messages": [{"role": role, "content": said} for role, _, said in TURNS]},
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": LONG}]},
    ],
    "conversations": [
        {"conversations": [{"from": name, "value": said} for _, name, said in TURNS]},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": LONG}]},
    ],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("init")
    # Once here, for all forked runs.
    for name in ("accelerate", "datasets", "peft", "pose_plugin.frameworks.trl", "trl.trainer.sft_trainer"):
        importlib.import_module(name)
    make_llama().save_pretrained(home / "base")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(home / "base")
    for name, rows in ROWS.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    return home


def run(home: Path, name: str, row: str, gpus: str = "0", *options: str) -> dict[str, Any]:
    """Write a script, run it, and look at its trainer."""
    from transformers import Trainer

    os.chdir(home)
    line = ["init", "base", "--target-length", "512", "--data", f"{row}.jsonl", "--gpus", gpus, *options]
    assert main([*line, "--output", f"{name}.py"]) == 0
    if gpus != "0":
        script = Path(f"{name}.py")
        script.write_text(script.read_text().replace("bf16=True,", "bf16=True, use_cpu=True,"))
    seen: dict[str, Any] = {"positions": []}
    train = Trainer.train

    def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        def record(module: Any, args: Any, given: dict[str, Any]) -> None:
            seen["positions"].append(int(given["position_ids"].max()))

        trainer.model.register_forward_pre_hook(record, with_kwargs=True)
        seen["trainer"] = trainer
        return train(trainer, *args, **kwargs)

    Trainer.train = watched  # type: ignore[method-assign]
    runpy.run_path(f"{name}.py", run_name="__main__")
    trainer = seen["trainer"]
    return {
        "steps": trainer.state.global_step,
        "farthest": max(seen["positions"]),
        "trained": [[i for i in row.get("labels", row["input_ids"]) if i != -100] for row in trainer.train_dataset],
        "types": {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad},
        "optimizer": f"{type(trainer.optimizer.optimizer).__module__} {type(trainer.optimizer.optimizer).__name__}",
        "rounds": getattr(trainer.optimizer.optimizer, "bf16_stochastic_round", None),
        "quantized": any(type(m).__name__ == "Linear4bit" for m in trainer.model.modules()),
        "lora": {config.r for config in getattr(trainer.model, "peft_config", {}).values()},
    }


@pytest.mark.parametrize("row", ROWS)
def test_one_step_on_a_cpu(home, row):
    done = forked(run, home, row, row)
    seen = done.value
    assert seen["steps"] == 1 and seen["types"] == {"torch.float32"}
    assert 64 < seen["farthest"] < 512
    out = home / "outputs" / row
    assert json.loads((out / "pose.json").read_text())["target_length"] == 512
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 512
    end = 2
    expected = {
        "text": [[*([30, 31] * 60)]] * 2,
        "input_ids": [list(range(60, 90))] * 2,
        "instruction": [[40, 41, end]] * 4,
        # Each answer is in the loss, with the end of its turn; the row that is longer than the window is left out.
        "messages": [[40, 41, end] * 2] * 2,
        "conversations": [[40, 41, end] * 2] * 2,
    }[row]
    assert [trained[: len(want)] for trained, want in zip(seen["trained"], expected, strict=True)] == expected
    assert ("2 of 4 conversations fit into 64 tokens" in done.output) is (row in ("messages", "conversations"))


@pytest.mark.parametrize(
    "method, packages, optimizer",
    [
        ("full", ("torchao",), "AdamW8bit"),
        ("lora", (), "AdamW"),
        ("qlora", ("bitsandbytes",), "AdamW"),
    ],
)
def test_one_step_of_each_method_for_a_gpu(home, method, packages, optimizer):
    """The script for a GPU, with `use_cpu` added."""
    for name in packages:
        pytest.importorskip(name)
    done = forked(run, home, method, "text", "1", "--method", method).value
    assert done["steps"] == 1 and done["farthest"] > 64
    assert done["types"] == ({"torch.bfloat16"} if method == "full" else {"torch.float32"})
    assert bool(done["rounds"]) is (method == "full")
    assert done["quantized"] is (method == "qlora") and done["lora"] == (set() if method == "full" else {32})
    assert optimizer in done["optimizer"]
