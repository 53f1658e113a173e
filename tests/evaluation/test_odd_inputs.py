"""`pose-plugin evaluate` as someone uses it who has a broken model, a full disk, or two terminals."""

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from pose_plugin.cli import main as cli
from tests.models import edit

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture
def save(tmp_path, tokenizers_by_name):
    def made(name, model, tokenizer="single digits"):
        model.save_pretrained(tmp_path / name)
        tokenizers_by_name[tokenizer].save_pretrained(tmp_path / name)
        return tmp_path / name

    (tmp_path / "text.txt").write_text("\ufeff" + TEXT, encoding="utf-8")
    return made


def run(*arguments):
    return cli.main(["evaluate", *map(str, arguments), "--quiet", "--no-figures"])


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["models"]


def test_one_broken_model_of_several_is_left_out(tmp_path, save, make_llama, capsys):
    base, last = save("base", make_llama()), save("last", make_llama(seed=1))
    broken = shutil.copytree(base, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:20000])
    arguments = ["--lengths", "200", "--trials", 1, "--output", tmp_path / "out"]
    assert run(base, broken, last, *arguments) == 1
    rows = results(tmp_path / "out")
    assert ["passkey" in row for row in rows] == [True, False, True]
    assert (
        "passkey was left out: " in rows[1]["notes"][0] and "broken could not be loaded on cpu" in rows[1]["notes"][0]
    )
    assert run(broken, *arguments) == 2
    assert "save or copy it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"num_attention_heads": 3}, "config.json could not be read: .* not a multiple of"),
        ("config.json", {"max_position_embeddings": "many"}, "config.json could not be read: .*'many'"),
        ("tokenizer.json", {"model": {"type": "New"}}, "has no tokenizer that loads; save it next to the model"),
    ],
)
def test_a_file_of_a_model_that_its_class_refuses(tmp_path, save, make_llama, capsys, file, change, message):
    folder = save("base", make_llama())
    edit(folder / file, lambda values: values.update(change))
    assert run(folder, "--lengths", "200", "--trials", 1, "--output", tmp_path / "out") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(f"{folder}.*{message}", line)


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_missing_weights_are_not_measured_as_random_ones(tmp_path, save, make_llama, capsys, kind):
    folder = save("base", make_llama())
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        folder = tmp_path / "adapter"
        config = peft.LoraConfig(r=2, target_modules=["q_proj"])
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config).save_pretrained(folder)
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    name = next(name for name in weights if "layers.1.self_attn.q_proj" in name)
    # As a compiled model saves its weights, all under another name.
    save_file({("_orig_mod." if key == name else "") + key: w for key, w in weights.items()}, file, {"format": "pt"})
    assert run(folder, "--lengths", "200", "--trials", 1, "--output", tmp_path / "out") == 2
    assert re.search(f"{folder.name} could not be loaded on cpu: .*missing.*layers.1.self_attn.q_proj",
                     capsys.readouterr().err)  # fmt: skip


def test_positions_that_end_take_only_longer_lengths_along(tmp_path, save, capsys):
    torch.manual_seed(0)
    sizes = {"n_positions": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 0, "bos_token_id": 0}
    model = save("gpt2", GPT2LMHeadModel(GPT2Config(vocab_size=400, **sizes)))
    assert run(model, "--lengths", "200,300", "--trials", 1, "--output", tmp_path / "out") == 1
    (row,) = results(tmp_path / "out")
    assert list(row["passkey"]["scores"]) == ["passkey/200"]
    assert "passkey at 300 was left out: IndexError" in row["notes"][-1]
    assert row["notes"][-1].endswith("its positions may end at max_position_embeddings=256")


def test_an_evaluator_whose_positions_end(tmp_path, save, make_llama):
    """All that needs it is left out, with the reason in every model's notes."""
    sizes = {"n_positions": 128, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 0, "bos_token_id": 0}
    judge, base = save("judge", GPT2LMHeadModel(GPT2Config(vocab_size=400, **sizes))), save("base", make_llama())
    arguments = [
        "--lengths",
        "200,300",
        "--texts",
        tmp_path / "text.txt",
        "--tasks",
        "longppl,gap",
        "--evaluator",
        judge,
    ]
    assert run(base, *arguments, "--short-context", 100, "--max-windows", 1, "--output", tmp_path / "out") == 1
    (row,) = results(tmp_path / "out")
    assert "gap" in row and "longppl" not in row
    assert row["notes"][-1].startswith("longppl at 200, 300 was left out: the evaluator judge: IndexError: ")


def test_a_model_that_counts_nothing_but_nan_is_not_the_best(tmp_path, save, make_llama, capsys):
    model = make_llama()
    model.model.layers[0].mlp.up_proj.weight.data.fill_(math.nan)
    models = save("nan", model), save("base", make_llama())
    arguments = ["--lengths", "200", "--texts", tmp_path / "text.txt", "--max-windows", 8, "--tasks", "gap,short"]
    assert run(*models, *arguments, "--output", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "Best over all measures: base (" in text and "| gap at 200 | base | inf |" in " ".join(text.split())
    assert run(*models[::-1], *arguments, "--output", tmp_path / "out") == 0
    guard = capsys.readouterr().out.split("Short-context guard")[1].split("\n\n")[1]
    assert guard.splitlines()[-1].split()[-4:] == ["-", "|", "lost", "|"]


def test_losses_of_other_tokenizers_are_not_compared(tmp_path, save, make_llama, capsys):
    models = save("a", make_llama()), save("other", make_llama(1600), "joined digits"), save("b", make_llama(seed=1))
    arguments = [
        "--lengths",
        "200",
        "--texts",
        tmp_path / "text.txt",
        "--max-windows",
        2,
        "--tasks",
        "perplexity,short",
    ]
    assert run(*models, *arguments, "--output", tmp_path / "out") == 0
    text = capsys.readouterr().out
    rows = results(tmp_path / "out")
    assert ["other tokens of the texts than that of a" in " ".join(row["notes"]) for row in rows] == [
        False,
        True,
        False,
    ]
    best = next(line for line in text.splitlines() if line.startswith("| perplexity at 200")).split()
    assert best[-4] == "-" and best[-2] != "-" and "other" not in best
    assert next(line for line in text.splitlines() if line.startswith("| other")).split()[-2] != "tokens"
    assert "other tokens |\n" in text


def test_a_byte_order_mark_is_no_token(tmp_path, save, make_llama):
    model = save("base", make_llama())
    (tmp_path / "plain.txt").write_text(TEXT)
    losses = []
    for text in ("text.txt", "plain.txt"):
        arguments = ["--lengths", "200", "--tasks", "perplexity", "--max-windows", 1, "--output", tmp_path / text[:4]]
        assert run(model, "--texts", tmp_path / text, *arguments) == 0
        losses.append(results(tmp_path / text[:4])[0]["perplexity"])
    assert losses[0] == losses[1]
