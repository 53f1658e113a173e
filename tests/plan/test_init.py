"""`pose-plugin init` writes a YAML and a script that `plan` and the frameworks take as they are."""

from __future__ import annotations

import ast
import json
import re
from itertools import product
from pathlib import Path

import pytest
import yaml
from datasets import load_dataset

from pose_plugin.cli.main import main
from pose_plugin.plan.init_trl import literal
from pose_plugin.plan.trl_script import from_script
from pose_plugin.utils.errors import PoSEError
from tests.models import make_llama, save
from tests.plan.test_architecture import LLAMA3_8B

ROWS = {
    "text": {"text": "w30 w31 w32 " * 60},
    "messages": {"messages": [{"role": "user", "content": "w30"}, {"role": "assistant", "content": "w31"}]},
    "conversations": {"conversations": [{"from": "human", "value": "w30"}, {"from": "gpt", "value": "w31"}]},
    "instruction": {"instruction": "w30", "output": "w31"},
    "roles": {"conversations": [{"role": "user", "content": "w30"}, {"role": "assistant", "content": "w31"}]},
    "from": {"messages": [{"from": "human", "value": "w30"}, {"from": "gpt", "value": "w31"}]},
    "input_ids": {"input_ids": list(range(3, 60)), "attention_mask": [1] * 57, "labels": list(range(3, 60))},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(make_llama(), "base")
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3" / "config.json").write_text(json.dumps(LLAMA3_8B))
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    return tmp_path


def planned(name: str, capsys, *options: str) -> dict:
    capsys.readouterr()
    assert main(["plan", name, "--draws", "50", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("row", ROWS)
def test_plan_takes_what_init_writes(folder, row, capsys):
    """And shows the same for the YAML and for the script."""
    plans = []
    for name in ("c.yaml", "c.py"):
        for _ in range(2):  # the second time, the same text is there
            line = ["init", "base", "--target-length", "512", "--data", f"{row}.jsonl", "--gpus", "1"]
            assert main([*line, "--output", name]) == 0
        plans.append(planned(name, capsys))
    values = yaml.safe_load((folder / "c.yaml").read_text())
    assert values["pose"]["target_length"] == 512
    assert values["pose"].get("train_length", values["sequence_len"]) == 64
    # Only `type: completion` cuts long texts into several rows.
    for plan in plans:
        plan["notes"] = [note for note in plan["notes"] if "type: completion" not in note]
    assert plans[0] == plans[1] and plans[0]["rows"] == 4
    assert not [each for each in plans[0]["warnings"] if "does not know" in each or "needs chats" in each]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["c.yaml", "c.py"])
def test_plan_warns_of_nothing_that_init_wrote(folder, name, tied, capsys):
    """Only of the data, which are given here as enough."""
    save(make_llama(tie_word_embeddings=tied), "base")
    for method, stretch, gpus in product(("full", "lora", "qlora"), (2, 4, 8, 16, 32), ("1", "2")):
        row = "messages" if gpus == "2" else "text"
        line = ["init", "base", "--target-length", str(64 * stretch), "--data", f"{row}.jsonl", "--method", method]
        (folder / name).unlink(missing_ok=True)
        assert main([*line, "--gpus", gpus, "--output", name]) == 0
        plan = planned(name, capsys, "--rows", "1000000", "--gpus", gpus, "--draws", "2000")
        assert plan["method"] == method and plan["target"] == 64 * stretch
        assert plan["warnings"] == [], (method, stretch, gpus)
        # A stretch by 8 needs the norms trained, and the embeddings, unless they are the output head too.
        text = (folder / name).read_text()
        assert ("input_layernorm" in text) is (method != "full" and stretch >= 8)
        assert ("embed_tokens" in text) is (method != "full" and stretch >= 8 and not tied)


@pytest.mark.parametrize("row", ["messages", "conversations", "roles", "from"])
def test_chats_are_read_by_the_names_of_their_turns(folder, row):
    for name in ("c.yaml", "c.py"):
        assert main(["init", "base", "--target-length", "512", "--data", f"{row}.jsonl", "--output", name]) == 0
    (data,) = yaml.safe_load((folder / "c.yaml").read_text())["datasets"]
    names = data.get("message_property_mappings", {"role": "role", "content": "content"})
    assert [turn[names["content"]] for turn in ROWS[row][data["field_messages"]]] == ["w30", "w31"]
    assert {turn[names["role"]] for turn in ROWS[row][data["field_messages"]]} <= {"user", "assistant", "human", "gpt"}
    # What the script does to the data, without the frameworks.
    script = ast.parse((folder / "c.py").read_text())
    kept = [each for each in script.body if isinstance(each, ast.FunctionDef)]
    (block,) = [each for each in script.body if isinstance(each, ast.With)]
    found = {"load_dataset": load_dataset, "DATA": f"{row}.jsonl"}
    exec(compile(ast.Module([*kept, *block.body[:2]], []), "c.py", "exec"), found)
    assert found["data"][0]["messages"] == ROWS["messages"]["messages"]


@pytest.mark.parametrize(
    "row, missing, needs",
    [
        ({"instruction": "w30", "response": "w31"}, "lacks output", {"c.yaml": 2, "c.py": 2}),
        # Axolotl takes rows for token ids only if they have all three; TRL makes the others.
        ({"input_ids": [3, 4]}, "lacks attention_mask, labels", {"c.yaml": 2, "c.py": 0}),
        ({"messages": [{"role": "user", "text": "w30"}]}, "messages is not a list of turns", {"c.yaml": 2, "c.py": 2}),
        ({"conversations": []}, "role and content or from and value", {"c.yaml": 2, "c.py": 2}),
    ],
)
def test_rows_that_lack_what_is_read(folder, capsys, row, missing, needs):
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for name, code in needs.items():
        assert main(["init", "base", "--target-length", "512", "--data", "rows.jsonl", "--output", name]) == code
        assert (missing in capsys.readouterr().err) is (code == 2)


@pytest.mark.parametrize(
    "gpus, memory, methods",
    [
        ("1", "80", ("full", "full")),
        # TRL's FSDP keeps float32 weights.
        ("8", "80", ("full", "full")),
        ("8", "24", ("full", "qlora")),
        ("1", "24", ("qlora", "qlora")),
        ("1", "40", ("lora", "lora")),
    ],
)
def test_the_first_method_that_fits_is_taken(folder, gpus, memory, methods, capsys):
    line = ["init", "meta-llama/Meta-Llama-3-8B", "--base", "llama3", "--target-length", "80k", "--data", "text.jsonl"]
    for name, method in zip(("c.yaml", "c.py"), methods, strict=True):
        assert main([*line, "--gpus", gpus, "--gpu-memory", memory, "--output", name]) == 0
        plan = planned(name, capsys, "--base", "llama3", "--gpus", gpus)
        assert plan["method"] == method
        assert plan["base"] == "meta-llama/Meta-Llama-3-8B" and plan["target"] == 81920
        gib = plan["memory_bytes"]["total"] / 2**30
        text = (folder / name).read_text()
        assert f"about {gib:.1f} GiB" in text and gib < float(memory)
        assert ("LlamaDecoderLayer" in text) is (gpus != "1" and method == "full")


@pytest.mark.parametrize("name", ["c.yaml", "c.py"])
def test_qlora_leaves_embeddings_frozen_that_do_not_fit(folder, name, capsys):
    line = ["init", "meta-llama/Meta-Llama-3-8B", "--base", "llama3", "--target-length", "80k", "--data", "text.jsonl"]
    line += ["--output", name, "--gpu-memory"]
    assert main([*line, "20"]) == 0
    assert "note: qlora fits only if the embeddings (embed_tokens) stay frozen." in capsys.readouterr().out
    plan, text = planned(name, capsys, "--base", "llama3"), (folder / name).read_text()
    assert plan["method"] == "qlora" and "input_layernorm" in text and "embed_tokens" not in text
    gib = plan["memory_bytes"]["total"] / 2**30
    assert f"about {gib:.1f} GiB" in text and "the embeddings, which do not fit" in text
    assert "the adapter leaves embeddings frozen" in "".join(plan["warnings"])
    # The smaller ones do not fit either, and each size is named.
    (folder / name).unlink()
    assert main([*line, "10"]) == 2
    sizes = r"full [\d.]+, lora [\d.]+, qlora 18\.6, qlora without the embeddings 1\d\.\d GiB per GPU"
    assert re.search(rf"--gpu-memory 10: no method fits into 85% of it \({sizes}\)", capsys.readouterr().err)
    # Without a stretch by 8, nothing is trained beside the adapter.
    assert main([*line, "10", "--target-length", "16k"]) == 2
    assert "without" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["c.yaml", "c.py"])
@pytest.mark.parametrize(
    "change, message",
    [
        (["--target-length", "64"], "--target-length 64 does not exceed the base's window of 64; raise it"),
        (["--train-length", "512"], "--train-length 512 is not below --target-length 512; shorten it"),
        (["--data", "missing.jsonl"], "--data missing.jsonl is no file on this machine; give a JSONL file, with one"),
        (["--data", "base"], "--data base is a folder; give a JSONL file"),
        (["--data", "base/config.json"], "base/config.json: the first row is not JSON"),
        (["--data", "empty.jsonl"], "empty.jsonl: there is no row; give"),
        (["--data", "list.jsonl"], "list.jsonl: the first row is [1, 2], no object"),
        (["--data", "other.jsonl"], "other.jsonl: the first row has the keys ['prompt'], and none of input_ids, mess"),
        (["--gpu-memory", "24GB"], "--gpu-memory: '24GB' is not a number above 0; leave its unit out"),
        (["--gpu-memory", "0.000001"], "--gpu-memory"),
        (["--output", "text.jsonl"], "--output text.jsonl ends neither in .yaml or .yml (Axolotl) nor in .py"),
        (["--output", "kept.yaml"], "--output kept.yaml exists already; name a new file"),
        (["--output", "d.py", "--framework", "axolotl"], "d.yaml"),
        (["--output", "d.yaml", "--framework", "trl"], "d.py"),
    ],
)
def test_wrong_input(folder, change, message, name, capsys):
    for file, text in {"empty": "\n", "list": "[1, 2]\n", "other": '{"prompt": "w30"}\n'}.items():
        (folder / f"{file}.jsonl").write_text(text)
    (folder / "kept.yaml").write_text("kept")
    line = ["init", "base", "--target-length", "512", "--data", "text.jsonl", "--output", name, *change]
    assert main(line) == 2
    assert message in capsys.readouterr().err
    assert not any((folder / each).exists() for each in ("c.yaml", "c.py", "d.yaml", "d.py"))
    assert (folder / "kept.yaml").read_text() == "kept"


@pytest.mark.parametrize(
    "base, message",
    [
        ("bsae", "cannot be read from bsae, which is no folder here (did you mean base?): "),
        ("someone/model", "cannot be read from someone/model, which is no folder here: "),
        ("base/config.json", "the base base/config.json is a file; give its folder, base"),
    ],
)
def test_a_base_that_is_no_folder(folder, base, message, capsys):
    line = ["init", base, "--target-length", "512", "--data", "text.jsonl", "--output", "c.yaml"]
    assert main(line) == 2
    assert message in capsys.readouterr().err and not (folder / "c.yaml").exists()


@pytest.mark.parametrize("name", ["c.yaml", "c.py"])
@pytest.mark.parametrize("target, note", [("256", "--extend"), ("1024", ""), ("4096", "nothing was shown to work")])
def test_init_prints_the_notes_of_the_plan(folder, target, note, name, capsys):
    line = ["init", "base", "--target-length", target, "--data", "messages.jsonl", "--gpus", "1", "--output", name]
    assert main(line) == 0
    printed = re.findall("^note: (.*)$", capsys.readouterr().out, re.M)
    assert printed == planned(name, capsys)["notes"] and note in "".join(printed)
    assert bool(printed) is bool(note)


def test_one_is_in_the_singular(folder, capsys):
    line = ["plan", "--base", "base", "--target-length", "512", "--train-length", "64", "--steps", "1", "--draws", "20"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "1 row (1 row × 1 × 1 GPU)" in shown and "1 step, 1 row," in shown and "1 row in all" in shown


def test_each_framework_has_its_own_default_name(folder):
    line = ["init", "base", "--target-length", "512", "--data", "text.jsonl"]
    assert main(line) == main([*line, "--framework", "trl"]) == 0
    assert (folder / "config.yaml").exists() and (folder / "train.py").exists()


HOSTILE = (
    "o'neil",
    'a"b',
    """'"' + x""",
    '""" + x',
    "a\nimport os",
    "a\rb",
    "#x: y",
    "{x}",
    "a\\",
    "é\u2028",
    "\udcff",
    "1e5",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_strings(folder, name):
    """A name of a folder or a file never becomes YAML or Python of its own."""
    (folder / name).symlink_to(folder / "base")
    data = f"{name}.jsonl"
    (folder / data).write_bytes((folder / "text.jsonl").read_bytes())
    for ending in ("yaml", "py"):
        file = f"{name}.{ending}"
        line = ["init", name, "--target-length", "512", "--data", data, "--gpus", "0", "--output", file]
        assert main(line) == 0
        text = (folder / file).read_text(encoding="utf-8")
        if ending == "yaml":
            values = yaml.safe_load(text)
            assert (values["base_model"], values["datasets"][0]["path"]) == (name, data)
            assert values["output_dir"] == f"outputs/{name}"
            assert values.keys() >= {"pose", "learning_rate", "saves_per_epoch"}
        else:
            found = {
                node.targets[0].id: node.value.value
                for node in ast.parse(text).body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            }
            assert (found["BASE"], found["DATA"], found["OUTPUT"]) == (name, data, f"outputs/{name}")
            # The same program as with a plain name, but for these constants.
            plain = ["init", "base", "--target-length", "512", "--data", "text.jsonl", "--gpus", "0"]
            if not (folder / "plain.py").exists():
                assert main([*plain, "--output", "plain.py"]) == 0
            others = ast.unparse(ast.parse((folder / "plain.py").read_text()))
            for mine, theirs in ((name, "base"), (data, "text.jsonl"), (f"outputs/{name}", "outputs/plain")):
                others = others.replace(ast.unparse(ast.Constant(theirs)), ast.unparse(ast.Constant(mine)), 1)
            assert ast.unparse(ast.parse(text)) == others


@pytest.mark.parametrize("name", HOSTILE)
def test_literal(name):
    assert ast.literal_eval(literal(name)) == name and literal(name).isprintable()


SCRIPT = """
TARGET = 512
config = extend_context(AutoConfig.from_pretrained("base"), TARGET, rope="base", theta=2e8)
model = AutoModelForCausalLM.from_pretrained("base", config=config, dtype=torch.float32)
args = SFTConfig(max_length=64, per_device_train_batch_size=2, max_steps=10, bf16=True)
SFTTrainer(model, args=args, data_collator=PoSECollator(tokenizer, sampler="randpos"))
"""


def test_plan_reads_any_trl_script(folder, capsys):
    (folder / "s.py").write_text(SCRIPT)
    plan = planned("s.py", capsys)
    assert (plan["window"], plan["target"], plan["sampler"], plan["steps"]) == (64, 512, "randpos", 10)
    assert plan["rope"]["parameters"]["rope_theta"] == 2e8
    (folder / "s.py").write_text(SCRIPT.replace("PoSECollator(tokenizer, ", "PoSECollator(tokenizer, pad_rows, "))
    assert from_script("s.py").settings.sampler == "randpos"
    run = from_script("s.py").run
    # Weights in float32, activations in bf16; TRL's defaults for what the script leaves out.
    assert (run.trained_bytes, run.weight_bytes, run.checkpointing, run.rows) == (4, 2, True, 2)
    assert from_script("s.py").bf16 is None
    for older in ("", "torch_"):
        (folder / "s.py").write_text(SCRIPT.replace("dtype=torch.float32", f"{older}dtype=torch.bfloat16"))
        assert from_script("s.py").run.trained_bytes == 2 and from_script("s.py").bf16 == "bf16=True"
    (folder / "s.py").write_text(SCRIPT + "\nLoraConfig(r=4, target_modules=['q_proj'], modules_to_save=['norm'])\n")
    run = from_script("s.py").run
    assert (run.method, run.lora_rank, run.lora_targets, run.saved_modules) == ("lora", 4, ["q_proj"], ["norm"])
    # PEFT's own choice, for each type of model.
    for given in ("", ", target_modules=None"):
        (folder / "s.py").write_text(SCRIPT + f"\nLoraConfig(r=4{given})\n")
        assert sorted(from_script("s.py").run.lora_targets) == ["q_proj", "v_proj"]


def test_a_script_that_asks_for_the_gpu_is_planned_for_one(folder):
    for text in ("bf16=torch.cuda.is_available()", "bf16=gpu"):
        script = SCRIPT.replace("bf16=True", text).replace("torch.float32", "torch.bfloat16")
        (folder / "s.py").write_text("gpu = torch.cuda.is_available()\n" + script)
        assert from_script("s.py").bf16 == "bf16=True"
    page = (Path(__file__).parent.parent.parent / "docs" / "trl.md").read_text(encoding="utf-8")
    (snippet,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "from_pretrained(base, " in each]
    (folder / "page.py").write_text('base = "base"\n' + snippet)
    found = from_script("page.py")
    assert (found.run.window, found.steps, found.run.trained_bytes) == (2048, 1000, 4)


@pytest.mark.parametrize(
    "call, rows",
    [
        ("data_files=DATA, split='train')", 4),
        ("data_files=[DATA, 'messages.jsonl'], split='train')", 8),
        ("data_files=DATA, split='train[:2]')", "train[:2]"),
        ("data_files=DATA, split='train').select(range(2))", "select(…)"),
        ("data_files=DATA, split='train').train_test_split(0.5)['train']", "train_test_split(…)"),
    ],
)
def test_the_rows_of_a_script(folder, call, rows):
    """Those of a part of the data are not counted, as a plan for all of them would promise too much."""
    script = SCRIPT.replace("max_steps=10, ", "num_train_epochs=1, ")
    (folder / "s.py").write_text(f"DATA = 'text.jsonl'\ndata = load_dataset('json', {call}\n{script}")
    found = from_script("s.py")
    assert (found.rows == rows and not found.notes) or found.notes == [
        f"split: {rows} takes a part of the data, so its rows are not counted"
    ]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("max_steps=10", "max_steps=args.steps", "max_steps=args.steps"),
        ("TARGET, rope", "read(TARGET), rope", "read(TARGET)"),
        ("SFTConfig(", "TrainingArguments(", "SFTConfig"),
        ("PoSECollator(", "Collator(", "PoSECollator"),
        ("TARGET = 512", "TARGET = 512\nSFTConfig()", "SFTConfig"),
        ("TARGET = 512", "TARGET = 512\nTARGET *= 2", "1=TARGET of extend_context is neither a literal nor"),
        (
            "TARGET = 512",
            "TARGET = 512\nif LONG:\n    TARGET = 1024",
            "a constant that the script sets once, at its top",
        ),
        ("max_steps=10", "**COMMON", "s.py, line 5: **COMMON of SFTConfig(…) cannot be read; write its arguments into"),
        ("TARGET, rope", "*TARGET, rope", "s.py, line 3: *TARGET of extend_context(…) cannot be read"),
        ("TARGET = 512", "TARGET = (", "s.py is not valid Python"),
        (
            "PoSECollator(",
            "PoSECollator(train_length=128, tokenizer=",
            "s.py: train_length=128 is longer than max_length=64",
        ),
    ],
)
def test_a_script_that_cannot_be_read(folder, old, new, message):
    (folder / "s.py").write_text(SCRIPT.replace(old, new))
    with pytest.raises(PoSEError, match=re.escape(message)):
        from_script("s.py")


def test_the_commands_of_the_page(folder):
    page = (Path(__file__).parent.parent.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    lines = re.findall(r"^pose-plugin (init .*)$", page, re.M)
    (folder / "rows.jsonl").write_bytes((folder / "text.jsonl").read_bytes())
    for line in lines:
        assert main([*line.split(), "--base", "base"]) == 0
    assert yaml.safe_load((folder / "config.yaml").read_text())["pose"]["target_length"] == 32768
    assert from_script("train.py", "base").settings.target_length == 32768
