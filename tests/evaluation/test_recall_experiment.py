"""benchmarks/recall: training rows fit the window and share no words with the judged ones; the comparison of arms."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from pose_plugin.evaluation.prompts import token_ids
from tests.pages import ROOT, recall_benchmark

TEXT = " ".join(f"Line {i} tells of the sea and the wind.\n" for i in range(900))


@pytest.fixture(scope="module")
def recall():
    with recall_benchmark() as module:
        yield module


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "example_configs/quickstart/base")


def test_rows_alternate_and_only_the_answer_of_a_retrieval_row_counts(recall, tokenizer, tmp_path):
    data, plays = recall("data"), [token_ids(tokenizer, TEXT)]
    data.write_rows(tokenizer, plays, 48, 512, 1, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    for retrieval, play in zip(rows[::2], rows[1::2], strict=True):
        assert len(play["input_ids"]) == 4096 and play["labels"] == play["input_ids"]
        assert 256 <= len(retrieval["input_ids"]) <= 512 + 60
        trained = [i for i, label in enumerate(retrieval["labels"]) if label != -100]
        assert trained == list(range(trained[0], len(retrieval["input_ids"])))
        key = tokenizer.decode(retrieval["input_ids"][trained[0] :]).strip()
        assert key.isdigit() and key in tokenizer.decode(retrieval["input_ids"][: trained[0]])


def test_plays_are_pieces_as_long_as_longer_rows(recall, tokenizer, tmp_path):
    data, ids = recall("data"), token_ids(tokenizer, TEXT)
    data.write_rows(tokenizer, [ids, ids[:5000]], 2, 6000, 1, tmp_path / "rows.jsonl")
    (_, play) = (json.loads(line)["input_ids"] for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert len(play) == 6000 < len(ids)


def test_trained_words_are_not_judged(recall):
    settings, training = recall("settings"), recall("training_words")
    assert len(training.TEMPLATES) >= 20 and len(set(training.TEMPLATES)) == len(training.TEMPLATES)
    assert len(settings.WORDING.names) >= settings.COUNT
    for fact, question in training.TEMPLATES:
        assert "{name}" in fact and "{key}" in fact and "{name}" in question and "{key}" not in question
    for name in training.NAMES:
        assert not any(name in judged.split() for judged in settings.WORDING.names)


def test_the_bootstrap_draws_haystacks_and_seeds(recall):
    compare = recall("compare")
    one, other = np.array([[0.9, 0.8], [0.7, 0.6]]), np.array([[0.5, 0.4], [0.3, 0.2]])
    assert compare.bootstrap(one, other) == pytest.approx((0.4, 0.4, 0.4))
    difference, low, high = compare.bootstrap(np.array([[1.0, 0.0], [0.0, 0.0]]), np.zeros((2, 2)))
    assert (difference, low, high) == (0.25, 0.0, 1.0)


def test_arms_are_paired_by_haystack_and_seed(recall):
    compare = recall("compare")
    trained = {("a", "1"): 0.5, ("a", "2"): 0.6, ("b", "1"): 0.7, ("b", "2"): 0.8}
    one, other = compare.paired(trained, {("a", ""): 0.1, ("b", ""): 0.2})
    assert one.tolist() == [[0.5, 0.6], [0.7, 0.8]] and other.tolist() == [[0.1, 0.1], [0.2, 0.2]]
    with pytest.raises(ValueError, match="not measured yet"):
        compare.paired(trained, {("a", "1"): 0.1})


def test_every_run_is_one_that_the_plugin_takes(recall, tmp_path):
    yaml = pytest.importorskip("yaml")
    from pose_plugin.frameworks.axolotl_settings import settings_of

    run = recall("run")
    for arm, rope, seed in run.ORDER + run.ORDER_64K:
        window = run.window_of(arm, rope)
        (tmp_path / f"rows-{window}-{seed}.jsonl").touch()
        config = yaml.safe_load(run.configured(tmp_path, arm, rope, seed, 2).read_text(encoding="utf-8"))
        settings = settings_of(config)
        assert settings.target_length == (65536 if rope == "yarn-8" else 32768)
        assert settings.train_length == window <= config["sequence_len"]
        assert (settings.sampler == "none") == (arm in ("no_skip", "full_length"))
    assert run.rows_of("full_length", "yarn-4") * 4096 == run.rows_of("pose_skip", "yarn-4") * 512
    assert run.window_of("full_length", "yarn-8") * 2 == 65536


def test_the_second_view_pulls_labelled_tokens_to_plain_positions(recall):
    import torch

    pytest.importorskip("axolotl")
    from tests.models import make_base, make_ids

    views, model, ids = recall("two_views"), make_base(), make_ids(12)
    labels = torch.where(torch.arange(12) < 8, -100, ids)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    plain, far = torch.arange(12)[None], torch.tensor([[*range(6), *range(40, 46)]])

    def pulled(places):
        return views.pull(model, inputs, model(input_ids=ids, position_ids=places).logits)

    assert pulled(plain).item() == pytest.approx(0, abs=1e-6)
    found = pulled(far)
    with torch.no_grad():
        teacher, student = (model(input_ids=ids, position_ids=p).logits[0, 7:-1].softmax(-1) for p in (plain, far))
    assert found.item() == pytest.approx((teacher * (teacher / student).log()).sum(-1).mean().item(), rel=1e-3)
    # The gradient is the student's: for logits, its probabilities minus the teacher's.
    logits = student.log().requires_grad_()
    views.divergence(logits, teacher.log()).backward()
    assert torch.allclose(logits.grad, (student - teacher) / len(student), atol=1e-6)


def test_a_torn_checkpoint_is_not_gone_on_from(recall, tmp_path):
    run = recall("run")
    for step, file in ((50, "trainer_state.json"), (100, "optimizer.pt")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / file).write_text("{}")
    run.drop_torn_checkpoints(tmp_path)
    assert run.last_step(tmp_path) == 50


def test_longer_haystacks_are_judged_on_other_texts_and_kept_in_another_file(recall, monkeypatch, tmp_path):
    judge, settings = recall("judge"), recall("settings")
    asked = []
    monkeypatch.setattr(judge, "judge", lambda *args: asked.append(args))
    for arguments in ("base", "base --length 8128", "yarn-8 --length 65472"):
        monkeypatch.setattr("sys.argv", ["judge.py", *arguments.split()])
        judge.main()
    assert [(places, length, file.name) for _, places, length, file in asked] == [
        (settings.JUDGED, 32704, "recall.json"),
        (settings.JUDGED, 8128, "recall.json"),
        (settings.JUDGED_FAR, 65472, "recall_64k.json"),
    ]
    answers = [judge.Answer("name", "1", distance, "1", True) for distance in (100, 60_000)]
    assert list(judge.by_band(answers, judge.edges_of(65472))) == ["0-2048", "49152-65536"]


def test_the_gpu_script_calls_the_commands_in_order_and_stops_at_its_limit(recall, tmp_path):
    script = tmp_path / "benchmarks/gpu/recall.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/gpu/recall.sh", script)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C"}

    def said(*arguments):
        command = ["bash", str(script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    before = ["judge.py base --length 65472", "judge.py yarn-8 --length 65472", "run.py all --rope yarn-8"]
    after = ["judge.py --table --length 65472", "compare.py pose_skip no_skip --rope yarn-8",
             "compare.py pose_skip yarn-8 --rope yarn-8"]  # fmt: skip
    assert said() == [f"benchmarks/recall/{line}" for line in [*before, *after]]
    run = recall("run")
    runs = [run.name_of(*each) for each in run.ORDER_64K]
    for name in [*runs, "pose_skip-yarn-4-1"]:
        (tmp_path / "outputs/recall" / name).mkdir(parents=True)
        (tmp_path / "outputs/recall" / f"{name}.yaml").touch()
    trained = [f"judge.py outputs/recall/{name} --length 65472" for name in sorted(runs)]
    assert len(trained) == 9 and said() == [f"benchmarks/recall/{line}" for line in [*before, *trained, *after]]
    assert said("0") == ["stopped after 0 s; start it again to go on"]


def test_short_training_loses_a_window_by_the_criterion_that_was_fixed(recall, monkeypatch):
    keep = importlib.import_module("keep")

    def row(model, text, shares):
        near, far = (
            [[f"f{i}", "1234", place, "", i < share * 10] for i in range(10)] for place, share in shares.items()
        )
        return {"model": model, "text": text, "start": 0, "answers": near + far}

    def rows(*far):
        return [row("base", t, {100: 1.0, 5000: 0.9}) for t in "ab"] + [
            row("plain", t, {100: 0.0, 5000: each}) for t, each in zip("ab", far, strict=True)
        ]

    for far, lost in (((0.7, 0.7), True), ((0.8, 0.8), False), ((0.0, 0.9), False), ((0.9, 0.9), False)):
        monkeypatch.setattr(keep, "load_rows", lambda path, far=far: rows(*far))
        assert keep.lost("base", "plain") is lost, far


@pytest.mark.parametrize("arm", ["plain", "pose"])
def test_the_runs_that_keep_a_window_are_ones_that_the_plugin_takes(recall, arm, monkeypatch, tmp_path):
    import yaml

    from pose_plugin.frameworks.axolotl_settings import settings_of

    keep = importlib.import_module("keep")
    monkeypatch.setattr(keep, "write_plays", lambda path, seed: None)
    values = yaml.safe_load(keep.configured(tmp_path / "run", arm, "3e-4", 1).read_text(encoding="utf-8"))
    settings = settings_of(values)
    assert (settings.target_length, settings.train_length, settings.rope.type) == (8192, 512, "none")
    assert values["max_steps"] * values["micro_batch_size"] == 512 and "adapter" not in values


def test_pose_and_plain_positions_are_compared_seed_by_seed(recall):
    keep = importlib.import_module("keep")
    found = {"base": 5, "plain-3e-4-1": 1, "pose-3e-4-1": 4, "plain-3e-4-2": 2, "pose-3e-4-2": 4, "plain-1e-4-1": 5}
    rows = [
        {"model": model, "text": text, "start": 0, "answers": [["a", "1", 5000, "", i < far] for i in range(5)]}
        for model, far in found.items()
        for text in ("one", "other")
    ]
    assert keep.difference(rows, ["plain-3e-4-1"], ["base"]) == pytest.approx((-0.8, -0.8, -0.8))
    last = keep.differences(rows).splitlines()[-1]
    assert last == "pose-3e-4 minus plain-3e-4, seeds in both 2, beyond 4096: +0.500 (95 %: +0.400 to +0.600)"
