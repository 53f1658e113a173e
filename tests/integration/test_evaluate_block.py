"""`evaluate:` in the `pose:` block and in `PoSECollator`: real runs measure, log, and train as they would without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked import CaseError, forked
from tests.integration.records import logits_far_out

LENGTHS = [128, 256]
NAMES = {"passkey/128", "passkey/256", "passkey/k_max", "perplexity/128", "perplexity/256"}


def block(folder: Path, **changes: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("w30 w41 w52 w63 w74 " * 60)
    return {"every": 1, "at_start": True, "lengths": LENGTHS, "texts": [str(text)], "trials": 2, **changes}


def measured(history: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in history if row.keys() >= NAMES}


def far_case(folder: Path) -> Any:
    from tests.integration import trl_runs

    asked = block(folder, tasks=["needle", "topics", "gap"], lengths=[300, 400], every=None)
    trainer = trl_runs.sft(folder, pose={"evaluate": asked})
    trainer.train()
    return trainer.state.log_history


@pytest.mark.once
def test_every_task(tmp_path):
    pytest.importorskip("trl")
    history = forked(far_case, tmp_path).value
    names = {f"needle/{kind}/{n}" for kind in ("single", "multi", "kv") for n in (300, 400)}
    names |= {"topics/first/300", "topics/first/400", "gap_loss/300", "gap_loss/400"}
    assert len([row for row in history if row.keys() >= names]) == 2


def axolotl_case(folder: Path, asked: dict[str, Any] | None) -> Any:
    from tests.integration.axolotl_runs import base_yaml, train

    pose = {"target_length": 512, "rope": "linear", **({"evaluate": asked} if asked else {})}
    packed = {"sample_packing": True, "sequence_len": 128}
    model, trainer = train(base_yaml(folder, pose=pose, **packed))
    weights = {name: value.detach().double().sum().item() for name, value in model.named_parameters()}
    record = (folder / "out" / "pose.json").read_text()
    return trainer.state.log_history, weights, model.config.use_cache, record


def test_axolotl_packed(tmp_path):
    pytest.importorskip("axolotl")
    from tests.integration.axolotl_runs import base_yaml

    base_yaml(tmp_path)
    history, weights, cache, record = forked(axolotl_case, tmp_path, block(tmp_path)).value
    found = measured(history)
    assert sorted(found) == [0, 1, 2]
    assert len({row["perplexity/256"] for row in found.values()}) == 3
    plain_history, plain_weights, plain_cache, _ = forked(axolotl_case, tmp_path, None).value
    assert weights == plain_weights and cache == plain_cache
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (history, plain_history)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert "text.txt" not in record


def trl_case(folder: Path, asked: dict[str, Any] | None, packing: bool) -> Any:
    from peft import LoraConfig
    from transformers import TrainerCallback

    from pose_plugin.evaluation.measures.perplexity import perplexity
    from tests.integration import trl_runs

    heard: list[tuple[int, set[str]]] = []

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            heard.append((state.global_step, set(logs)))

    peft = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    trainer = trl_runs.sft(folder, pose={"evaluate": asked} if asked else {}, peft=peft, packing=packing)
    trainer.add_callback(Logger())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    logits = logits_far_out(trainer.model)
    text = (folder / "text.txt").read_text() if asked else "w30 " * 300
    tokenizer = trainer.processing_class
    after = perplexity(trainer.model, tokenizer, [text], LENGTHS, max_windows=10, progress=False).metrics()
    return losses, logits, trainer.state.log_history, heard, after


@pytest.mark.ends
@pytest.mark.parametrize("packing", [False, True])
def test_trl(tmp_path, packing):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    losses, logits, history, heard, after = forked(trl_case, tmp_path, block(tmp_path, every=2), packing).value
    last = max(row["step"] for row in history)
    found = measured(history)
    assert sorted(found) == sorted({0, *range(2, last + 1, 2), last})
    assert [step for step, names in heard if names >= NAMES] == sorted(found)
    # Measured in the middle of packed training with our rule in force, and alone afterwards: the same numbers.
    assert {name: found[last][name] for name in after} == after
    plain = forked(trl_case, tmp_path, None, packing).value
    assert losses == plain[0] and logits == plain[1]


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [20]}, "length=20"),
        ({"lengths": [4096]}, "length=4096"),
        ({"tasks": ["needle"], "lengths": [40]}, "length=40"),
        ({"tasks": ["topics"], "lengths": [128]}, "length=128"),
        ({"texts": ["no.txt"]}, "evaluate.texts: no.txt"),
    ],
)
def test_refused_before_the_first_step(tmp_path, changes, message):
    pytest.importorskip("trl")
    from tests.integration import trl_runs

    def case():
        trl_runs.sft(tmp_path, pose={"evaluate": block(tmp_path, **changes)}).train()

    with pytest.raises(CaseError, match=message) as failure:
        forked(case)
    assert "'loss'" not in str(failure.value)


def rank_case(folder: Path, asked: dict[str, Any]) -> Any:
    from tests.integration import trl_runs

    trainer = trl_runs.sft(folder, pose={"evaluate": asked}, per_device_train_batch_size=1, ddp_backend="gloo")
    trainer.train()
    return measured(trainer.state.log_history)


@pytest.mark.once
def test_two_processes_measure_the_same(tmp_path):
    pytest.importorskip("trl")
    from tests.forked import good_ranks
    from tests.integration import trl_runs

    trl_runs.make_model(tmp_path)
    first, second = (one.value for one in good_ranks(rank_case, tmp_path, block(tmp_path, every=None)))
    assert sorted(first) == [0, 8]
    assert all(first[step][name] == second[step][name] for step in first for name in NAMES)
