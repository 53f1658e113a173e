"""`pose-plugin check`: a right folder passes, and each kind of damage is found under its own name."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pose_plugin.checkpoints import check, reload_worker
from pose_plugin.checkpoints.check import check_folder
from pose_plugin.checkpoints.comparisons import logit_distance, tolerance
from pose_plugin.checkpoints.probe import probe_inputs
from pose_plugin.cli.main import main
from pose_plugin.utils.errors import PoSEError
from tests.models import ROPES, TARGET, edit, finish, save_adapter, save_base, save_full

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    save_full(folder / "full")
    save_adapter(folder / "adapter")
    return folder


@pytest.fixture
def here(monkeypatch) -> None:
    """Reload in this process, as a separate one imports transformers for seconds."""
    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: reload_worker.answer(request))


def copy(home: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(home / name, tmp_path / name))


def weights(folder: Path, change: Any) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def set_factor(values: dict[str, Any], *keys: str) -> None:
    for key in keys:
        values[key]["factor"] = 4.0


def without_rope(values: dict[str, Any]) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        del values[key]


def drop(name: str) -> Any:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if name in key]


def wrap(tensors: dict[str, Any]) -> None:
    for key in list(tensors):
        tensors[f"base_model.model.{key}"] = tensors.pop(key)


def forget(folder: Path) -> None:
    """Make it the folder of another trainer."""
    for name in ("pose.json", "pose_probe.json"):
        (folder / name).unlink()


def scale(name: str, factor: float) -> Any:
    return lambda tensors: tensors.update({key: tensors[key] * factor for key in tensors if name in key})


@pytest.mark.parametrize("name", ["full", "adapter"])
def test_in_a_process_without_this_package(home, name, capsys):
    assert main(["check", str(home / name)]) == 0
    out = capsys.readouterr().out
    assert "loads with transformers" in out and out.endswith("passed\n")
    assert "max_position_embeddings=512" in out and "model_max_length=512" in out


def test_the_process_cannot_import_this_package(tmp_path):
    """Not even from the folder in which it starts."""
    script = Path(check.__file__).with_name("reload_worker.py")
    code = script.read_text().replace("    with open(sys.argv[1]", "    import pose_plugin\n    with open(sys.argv[1]")
    (tmp_path / "altered.py").write_text(code)
    import subprocess
    import sys

    done = subprocess.run([sys.executable, str(tmp_path / "altered.py")], capture_output=True, text=True)
    assert "pose_plugin is blocked here" in done.stderr


# name: (folder, what is done to it, what must be named)
DAMAGE: dict[str, tuple[str, Any, set[str]]] = {
    "none": ("full", lambda folder: None, set()),
    "rope removed": (
        "full",
        lambda folder: edit(folder / "config.json", without_rope),
        {"frequencies", "logits"},
    ),
    "factor altered": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: set_factor(c, "rope_parameters", "rope_scaling")),
        {"frequencies", "logits"},
    ),
    "factor altered for transformers 4 only": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: set_factor(c, "rope_scaling")),
        # transformers 5 lets rope_scaling win.
        {"older form", "frequencies", "logits"},
    ),
    "older form lost": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: c.pop("rope_scaling")),
        {"older form"},
    ),
    "theta of the older form lost": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: c.pop("rope_theta")),
        {"older form"},
    ),
    "maximum lowered": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: c.update(max_position_embeddings=64)),
        {"maximum"},
    ),
    "tokenizer's limit lost": (
        "full",
        lambda folder: edit(folder / "tokenizer_config.json", lambda c: c.update(model_max_length=64)),
        {"tokenizer"},
    ),
    "tokenizer lost": (
        "full",
        lambda folder: [file.unlink() for file in folder.glob("token*")],
        {"tokenizer"},
    ),
    "one weight altered by a hundredth": (
        "full",
        lambda folder: weights(folder, scale("layers.1.mlp.down_proj", 1.01)),
        {"logits"},
    ),
    "weights lost": ("full", lambda folder: (folder / "model.safetensors").unlink(), {"weights"}),
    "some weights lost": (
        "full",
        lambda folder: weights(folder, drop("layers.1.mlp")),
        {"weights", "logits"},
    ),
    "some weights lost, without a probe": (
        "full",
        lambda folder: [forget(folder), weights(folder, drop("layers.1.mlp"))],
        {"weights"},
    ),
    "names of a wrapped model": (
        "full",
        lambda folder: [forget(folder), weights(folder, wrap)],
        {"weights"},
    ),
    "some weights of an adapter lost, without a probe": (
        "adapter",
        lambda folder: [forget(folder), weights(folder, drop("layers.1."))],
        {"weights"},
    ),
    "weights lost, without a vocabulary": (
        "full",
        lambda folder: [
            forget(folder),
            edit(folder / "config.json", lambda c: c.pop("vocab_size")),
            weights(folder, drop("layers.1.mlp")),
        ],
        {"reload"},
    ),
    "a tokenizer without a limit, as some tools write it": (
        "full",
        lambda folder: edit(folder / "tokenizer_config.json", lambda c: c.update(model_max_length=math.inf)),
        set(),
    ),
    "older form with its base beside it": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: c["rope_scaling"].pop("rope_theta")),
        set(),
    ),
    "probe lost": ("full", lambda folder: (folder / "pose_probe.json").unlink(), {"logits"}),
    "another target in the record": (
        "full",
        lambda folder: edit(folder / "pose.json", lambda r: r.update(target_length=256)),
        {"target"},
    ),
    "a card of another window": (
        "full",
        lambda folder: (folder / "README.md").write_text("# full: a context window of 64 tokens\n"),
        {"target"},
    ),
    "generate ends at the old window": (
        "full",
        lambda folder: (folder / "generation_config.json").write_text('{"max_length": 64}'),
        {"lengths", "generate"},
    ),
    "another length in the config": (
        "full",
        lambda folder: edit(folder / "config.json", lambda c: c.update(seq_length=64)),
        {"lengths"},
    ),
    "no record and no probe": (
        "full",
        lambda folder: [(folder / name).unlink() for name in ("pose.json", "pose_probe.json")],
        set(),
    ),
    "adapter": ("adapter", lambda folder: None, set()),
    "adapter without its config": ("adapter", lambda folder: (folder / "config.json").unlink(), {"config"}),
    "adapter without weights": (
        "adapter",
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        {"weights"},
    ),
    "adapter altered": ("adapter", lambda folder: weights(folder, scale("lora_B", 0.9)), {"logits"}),
    "adapter with the base's config": (
        "adapter",
        lambda folder: shutil.copy(folder.parent / "base" / "config.json", folder / "config.json"),
        # transformers 5 writes no theta where transformers 4 looks for it.
        {"older form", "maximum", "frequencies", "logits"},
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(home, tmp_path, here, name):
    source, damage, wanted = DAMAGE[name]
    shutil.copytree(home / "base", tmp_path / "base")
    folder = copy(home, tmp_path, source)
    damage(folder)
    report = check_folder(folder)
    assert set(report.differing()) == wanted, str(report)
    assert report.passed is (not wanted)
    (last,) = str(report).splitlines()[-1:]
    assert ("passed" if not wanted else f"differs in {', '.join(report.differing())}") in last


def test_what_a_foreign_folder_does_not_prove_is_stated(home, tmp_path, here):
    """It is compared with its own config: the live frequencies are those that it states."""
    folder = copy(home, tmp_path, "full")
    for name in ("pose.json", "pose_probe.json"):
        (folder / name).unlink()
    report = check_folder(folder)
    verdicts = {(what, verdict) for what, verdict, _ in report.findings}
    assert {("record", "warning"), ("logits", "note"), ("frequencies", "ok"), ("generate", "ok")} <= verdicts
    # And as transformers 5 alone would have saved it: older readers would lose the rope.
    edit(folder / "config.json", lambda values: values.pop("rope_scaling"))
    report = check_folder(folder)
    assert report.passed and ("older form", "warning") in {(what, verdict) for what, verdict, _ in report.findings}


LISTS = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
PUBLISHED = {
    "Llama 3.1, whose factor is no ratio of windows": {
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    },
    "Phi-3, whose original window is next to its lists": {
        "rope_scaling": {"type": "longrope", **LISTS}, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_raise_no_alarm(home, tmp_path, here, name):
    folder = copy(home, tmp_path, "full")
    forget(folder)
    edit(folder / "config.json", lambda values: [values.pop("rope_parameters"), values.update(PUBLISHED[name])])
    report = check_folder(folder)
    assert report.passed and {what for what, verdict, _ in report.findings if verdict == "warning"} == {"record"}
    assert ("frequencies", "ok") in {(what, verdict) for what, verdict, _ in report.findings}


def test_a_run_of_no_steps_is_a_warning(home, tmp_path, here):
    folder = copy(home, tmp_path, "full")
    edit(folder / "pose.json", lambda record: record.update(trained={"steps": 0}))
    report = check_folder(folder)
    (sentence,) = [text for what, verdict, text in report.findings if (what, verdict) == ("training", "warning")]
    assert "steps=0" in sentence and str(report).endswith("passed; warnings: training")


def test_the_base_of_an_adapter_may_end_generation(home, tmp_path, here):
    """Its generation_config.json is not in the adapter's folder, so a reload by PEFT reads the base's."""
    from pose_plugin import load_extended

    shutil.copytree(home / "base", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"max_length": 64}')
    folder = copy(home, tmp_path, "adapter")
    report = check_folder(folder, base=str(tmp_path / "base"))
    assert report.passed and "warnings: generate" in str(report)
    assert load_extended(folder, base=str(tmp_path / "base")).generation_config.max_length == TARGET


def test_findings_as_json(home, tmp_path, here, capsys):
    folder = copy(home, tmp_path, "full")
    edit(folder / "config.json", lambda values: values.update(max_position_embeddings=64))
    assert main(["check", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False and found["folder"] == str(folder)
    (wrong,) = [each for each in found["findings"] if each["verdict"] == "differs"]
    assert wrong["what"] == "maximum" and "target_length=512" in wrong["sentence"]


def test_the_comparison_can_fail(home, here):
    """Where the extension is lost the logits are farther apart than allowed, and the report says how far."""
    report = check_folder(home / "full")
    (sentence,) = [text for what, _, text in report.findings if what == "logits"]
    assert "up to 511" in sentence
    lost = float(sentence.rsplit("it would be ", 1)[1])
    assert lost > 0.1


@pytest.mark.parametrize("changes", [{"seed": 1}, {"intermediate_size": 96}], ids=["other weights", "other sizes"])
def test_a_wrong_base(home, tmp_path, here, changes):
    model = save_base(tmp_path / "other", **{k: v for k, v in changes.items() if k != "seed"})
    if "seed" in changes:
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.neg_()
        model.save_pretrained(tmp_path / "other")
    report = check_folder(home / "adapter", base=str(tmp_path / "other"))
    assert report.differing() == (["logits"] if "seed" in changes else ["reload"]), str(report)
    if "seed" not in changes:
        assert "--base names another" in str(report)


def test_without_a_stretch_the_report_does_not_mention_losing_it(tmp_path, here):
    save_full(tmp_path / "model", "none")
    report = check_folder(tmp_path / "model")
    assert report.passed and "plain" not in report.numbers and "would be" not in str(report)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope(tmp_path, here, name):
    save_full(tmp_path / "model", ROPES[name])
    report = check_folder(tmp_path / "model")
    assert report.passed, str(report)


def test_dtype_may_be_coarser_and_is_reported(home, here):
    report = check_folder(home / "full", dtype="float16")
    (sentence,) = [text for what, _, text in report.findings if what == "logits"]
    assert report.passed and "float16" in sentence and report.numbers["logits"] > 1e-3


# -- merged models -------------------------------------------------------------------------------------------------


def test_a_merged_model_is_repaired_and_passes(home, tmp_path, here, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # On the plain base, a common way: the merged config has no extension.
    plain = AutoModelForCausalLM.from_pretrained(home / "base")
    merged = PeftModel.from_pretrained(plain, str(home / "adapter")).merge_and_unload()
    merged.config.foreign_key = {"kept": [1, 2]}
    merged.save_pretrained(tmp_path / "merged")
    alone = check_folder(tmp_path / "merged")
    assert alone.differing() == ["tokenizer"] and "has no pose.json" in str(alone)
    bare = check_folder(tmp_path / "merged", like=home / "adapter")
    assert set(bare.differing()) == {"older form", "maximum", "tokenizer", "frequencies", "logits"}

    assert main(["check", str(tmp_path / "merged"), "--like", str(home / "adapter"), "--repair"]) == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["foreign_key"] == {"kept": [1, 2]}
    assert config["max_position_embeddings"] == TARGET and config["rope_scaling"]["rope_type"] == "yarn"
    # Now it has its own record and probe.
    assert check_folder(tmp_path / "merged").passed


@pytest.mark.parametrize("what", ["a run's own model", "a model of another shape"])
def test_another_model_is_not_repaired(home, tmp_path, capsys, what):
    """--repair would replace its window and its record."""
    folder = copy(home, tmp_path, "full")
    if what == "a model of another shape":
        forget(folder)
        edit(folder / "config.json", lambda values: values.update(num_hidden_layers=7))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert main(["check", str(folder), "--like", str(home / "adapter"), "--repair"]) == 2
    assert ("num_hidden_layers=7" if "shape" in what else "pose.json") in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_merged_model_in_a_coarser_type(home, tmp_path, here):
    """Axolotl saves merged models in the type of the run: the report says which, and allows what it resolves."""
    from pose_plugin import load_extended
    from pose_plugin.checkpoints import complete_merged

    load_extended(home / "adapter").merge_and_unload().to(torch.float16).save_pretrained(tmp_path / "merged")
    complete_merged(tmp_path / "merged", home / "adapter")
    report = check_folder(tmp_path / "merged")
    assert report.passed and report.numbers["logits"] > 1e-3 and "float16" in str(report), str(report)


def test_load_extended_merges_without_repair_of_the_config(home, tmp_path, here):
    from pose_plugin import load_extended

    load_extended(home / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    report = check_folder(tmp_path / "merged", like=home / "adapter")
    assert set(report.differing()) == {"older form", "tokenizer"}, str(report)


# -- input that cannot work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nothing"], ["nothing"]),
        (["{tmp}"], ["config.json"]),
        (["{home}/full", "--like", "{home}/base"], ["pose.json", "--like"]),
        (["{home}/full", "--repair"], ["--like"]),
        (["{home}/full", "--dtype", "fp16"], ["--dtype fp16", "float16"]),
        (["{home}/full", "--python", "{tmp}/python"], ["--python"]),
    ],
    ids=["no folder", "empty folder", "not ours", "repair like what", "no such type", "no interpreter"],
)
def test_bad_input(home, tmp_path, capsys, arguments, words):
    assert main(["check", *(each.format(tmp=tmp_path, home=home) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_broken_json_is_named(home, tmp_path, here):
    folder = copy(home, tmp_path, "full")
    (folder / "pose_probe.json").write_text("{")
    with pytest.raises(PoSEError, match=r"pose_probe\.json is not valid JSON"):
        check_folder(folder)


# -- the pieces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "original", "target", "positions"),
    [
        (1000, 64, 512, [*range(12), *range(64, 76), *range(504, 512)]),
        (1000, 2048, 32768, [*range(12), *range(2048, 2060), *range(32760, 32768)]),
        (1000, 8, 16, list(range(16))),
        (10, 512, 512, [*range(12), *range(504, 512)]),
    ],
)
def test_probe_inputs(vocabulary, original, target, positions):
    probe = probe_inputs(vocabulary, original, target)
    assert probe["positions"] == positions and len(probe["ids"]) == len(positions)
    assert 0 <= min(probe["ids"]) <= max(probe["ids"]) < vocabulary
    kept = probe["vocabulary"]
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == vocabulary - 1 and len(kept) <= 64
    assert probe == probe_inputs(vocabulary, original, target)


def test_logit_distance():
    wanted = [[1.0, -1.0], [3.0, 1.0]]
    assert logit_distance(wanted, wanted) == 0.0
    # ‖(0.1, 0)‖ / ‖(1, −1)‖ at the second position.
    assert logit_distance([[1.0, -1.0], [3.1, 1.0]], wanted) == pytest.approx(0.1 / np.sqrt(2))
    assert logit_distance([[float("nan"), 0.0], [3.0, 1.0]], wanted) == np.inf
    assert logit_distance([[1.0], [3.0]], wanted) == np.inf


@pytest.mark.parametrize(
    ("probe", "adapter", "dtype", "allowed"),
    [
        ({"dtype": "float32", "compute": "float32", "quantization": None}, False, "float32", 1e-3),
        ({"dtype": "float32", "compute": "bfloat16", "quantization": None}, False, "float32", 0.1),
        ({"dtype": "float32", "compute": "tf32", "quantization": None}, False, "float32", 0.03),
        ({"dtype": "float16", "compute": "float16", "quantization": None}, True, "float32", 0.03),
        ({"dtype": "float32", "compute": "float32", "quantization": None}, False, "bfloat16", 0.1),
        ({"dtype": "float32", "compute": "float32", "quantization": {"load_in_4bit": True}}, True, "float32", 0.1),
        ({"dtype": "float32", "compute": "float32", "quantization": {"load_in_4bit": True}}, False, "float32", 0.5),
    ],
)
def test_tolerance_follows_the_coarsest_type(probe, adapter, dtype, allowed):
    assert tolerance(probe, adapter, dtype)[0] == allowed


def test_measuring_leaves_the_model_as_it_was(home):
    from transformers import AutoModelForCausalLM

    from pose_plugin.checkpoints.probe import take_probe

    model = AutoModelForCausalLM.from_pretrained(home / "full").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    first = take_probe(model, TARGET)
    assert first == take_probe(model, TARGET)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("pose_probe.json", "{}", "lacks ids"),
        ("config.json", "[]", "holds a list"),
        ("pose.json", "[1]", "holds a list"),
        ("pose.json", '{"target_length": "many"}', "target_length='many'"),
    ],
)
def test_files_of_another_shape_are_named_and_never_pass(home, tmp_path, capsys, name, content, named):
    folder = copy(home, tmp_path, "full")
    (folder / name).write_text(content)
    assert main(["check", str(folder)]) == 2
    output = capsys.readouterr().err
    assert str(folder / name) in output and named in output


def test_tied_embeddings_that_were_trained_apart(tmp_path, here, capsys):
    """PEFT's own merge unties them. A merge that keeps the base's config (Axolotl's default) makes another model."""
    from pose_plugin import load_extended

    save_base(tmp_path / "base", tie_word_embeddings=True)
    model = save_adapter(tmp_path / "adapter", base=tmp_path / "base", modules_to_save=["embed_tokens"])
    with torch.no_grad():
        model.get_input_embeddings().modules_to_save["default"].weight.mul_(-1)
    model.save_pretrained(tmp_path / "adapter")
    finish(tmp_path / "adapter", model, "yarn")
    load_extended(tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    shutil.copytree(tmp_path / "merged", tmp_path / "tied")
    command = ["check", "--like", str(tmp_path / "adapter"), "--repair"]
    assert main([*command, str(tmp_path / "merged")]) == 0, capsys.readouterr().out

    weights(tmp_path / "tied", lambda tensors: tensors.pop("lm_head.weight"))
    edit(tmp_path / "tied" / "config.json", lambda values: values.update(tie_word_embeddings=True))
    assert main([*command, str(tmp_path / "tied")]) == 2
    assert "merge_method: legacy" in capsys.readouterr().err
    assert not (tmp_path / "tied" / "pose.json").exists()
    report = check_folder(tmp_path / "tied", like=tmp_path / "adapter")
    assert {"logits", "embeddings"} <= set(report.differing())
