"""`pose-plugin export`: the lines set what each engine would not derive by itself, and nothing is scaled twice."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pose_plugin.checkpoints import check, reload_worker
from pose_plugin.checkpoints.saved import read_saved
from pose_plugin.cli.main import main
from pose_plugin.export import ENGINES, exporter
from pose_plugin.export.engines import rules_of, taken
from pose_plugin.utils.errors import PoSEError
from tests.export import engine_rules
from tests.models import ROPES, TARGET, edit, extended, finish, save, save_adapter, save_base, save_full

pytest.importorskip("peft")

ALL = {**ROPES, "own attention": {"type": "yarn", "attention_factor": 1.5}}
DIM = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    for name, rope in ALL.items():
        save_full(folder / name, rope)
        save_adapter(folder / f"{name} adapter", rope)
    save_adapter(folder / "whole adapter", "yarn", modules_to_save=["embed_tokens"])
    return folder


def options(line: str) -> dict[str, str]:
    """--key value, as a shell splits them."""
    words = shlex.split(line)
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# -- vLLM and SGLang: the rule by which they derive maximum and frequencies, on our output -------------------------


@pytest.mark.parametrize("name", ALL)
def test_maxima(home, name):
    """The line asks for the target, which is allowed; without it linear would get 8 times the target."""
    saved = read_saved(home / name)
    config = config_of(home / name)
    by_itself, most = engine_rules.vllm_maxima(config, tokenizer_maximum=TARGET)
    for rule in rules_of("vllm"):
        found = taken(rule, saved)
        assert (found.default, found.most) == (by_itself, most)
    asked = int(options(exporter("vllm")(saved).lines[0])["--max-model-len"])
    assert asked == TARGET <= most
    assert by_itself == {"linear": 8 * TARGET, "yarn-revised": 64}.get(name, TARGET)

    by_itself, most = engine_rules.sglang_maxima(config)
    (rule,) = rules_of("sglang")
    assert taken(rule, saved).default == by_itself
    asked = int(options(exporter("sglang")(saved).lines[0])["--context-length"])
    assert asked == TARGET <= most
    assert by_itself == {"linear": 8 * TARGET}.get(name, TARGET)


@pytest.mark.parametrize("name", ALL)
def test_their_own_default_is_noted(home, name):
    for engine, wrong in (("vllm", {"linear": 4096, "yarn-revised": 64}), ("sglang", {"linear": 4096})):
        notes = " ".join(exporter(engine)(read_saved(home / name)).notes)
        assert (f"would take {wrong.get(name)}, not 512" in notes) is (name in wrong)


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ALL)
def test_frequencies(home, name, engine, adapter):
    """Row by row of the engine's table: what the trained model has, at the last position of the target too."""
    folder = home / (f"{name} adapter" if adapter else name)
    saved = read_saved(folder)
    (line,) = exporter(engine)(saved).lines
    passed = options(line).get("--hf-overrides" if engine == "vllm" else "--json-model-override-args", "{}")
    # The engine starts from the model that it is given, an adapter's plain base.
    config = config_of(home / "base" if adapter else folder)
    config.update(json.loads(passed))
    assert config["max_position_embeddings"] == TARGET
    probe = json.loads((folder / "pose_probe.json").read_text())["frequencies"]
    (trained,) = probe.values()
    row = {"vllm": engine_rules.vllm_row, "sglang": engine_rules.sglang_row}[engine]
    for position in (1, 64, TARGET - 1):
        angles, scale = row(config["rope_parameters"], DIM, position, TARGET)
        np.testing.assert_allclose(angles, position * np.array(trained["inv_freq"]), rtol=1e-5)
        assert scale == pytest.approx(trained["scale"], rel=1e-6)


def test_the_rules_can_fail(home):
    """Without overrides, the plain base has other frequencies, and longrope another scale."""
    trained = json.loads((home / "yarn" / "pose_probe.json").read_text())["frequencies"]["model.rotary_emb.inv_freq"]
    plain = config_of(home / "base")["rope_parameters"]
    angles, _ = engine_rules.vllm_row(plain, DIM, 63, TARGET)
    assert not np.allclose(angles, 63 * np.array(trained["inv_freq"]), rtol=1e-2)
    revised = config_of(home / "yarn-revised")["rope_parameters"]
    _, scale = engine_rules.vllm_row(revised, DIM, 63, TARGET)
    assert scale != pytest.approx(revised["attention_factor"], rel=1e-2)


def edited(folder: Path, change: Any) -> Any:
    edit(folder / "config.json", change)
    return read_saved(folder)


def test_a_rope_nested_by_layer_type_is_passed_complete(tmp_path):
    """Only the layers that see far get the scale."""
    save_full(tmp_path / "model", "yarn-revised")

    def nest(values: dict[str, Any]) -> None:
        flat = values["rope_parameters"]
        sliding = {"rope_type": "default", "rope_theta": 10000.0}
        values["rope_parameters"] = {"full_attention": flat, "sliding_attention": sliding}

    line = exporter("vllm")(edited(tmp_path / "model", nest)).lines[0]
    passed = json.loads(options(line)["--hf-overrides"])["rope_parameters"]
    assert passed["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert passed["full_attention"]["long_mscale"] == passed["full_attention"]["attention_factor"]


def test_a_window_that_is_longer_than_the_target(tmp_path):
    """`rope: none` keeps it. A limit at the target would keep vLLM below it."""
    save_base(tmp_path / "base", max_position_embeddings=2 * TARGET)
    save_full(tmp_path / "model", "none")
    saved = read_saved(tmp_path / "model")
    assert (saved.target, saved.maximum, saved.tokenizer_maximum) == (TARGET, 2 * TARGET, 2 * TARGET)
    assert options(exporter("vllm")(saved).lines[0])["--max-model-len"] == str(2 * TARGET)


def test_a_lost_tokenizer_limit_is_refused(home, tmp_path):
    save_full(tmp_path / "model", "linear")
    edit(tmp_path / "model" / "tokenizer_config.json", lambda values: values.update(model_max_length=32))
    with pytest.raises(PoSEError, match=r"256 tokens.*model_max_length"):
        exporter("vllm")(read_saved(tmp_path / "model"))


# -- every engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_command(home, engine, capsys):
    assert main(["export", str(home / "yarn"), "--engine", engine]) == 0
    out = capsys.readouterr().out
    assert str(home / "yarn") in out
    # A temporary folder may be called pytest-512.
    assert ("512" in out.replace(str(home), "")) is (engine not in ("transformers", "ollama", "mlx"))


def test_adapters_with_whole_modules_are_merged_first(home):
    for engine in ("vllm", "sglang", "llama.cpp", "tgi"):
        first, second, *rest = exporter(engine)(read_saved(home / "whole adapter")).lines
        assert "merge_and_unload" in first and "--repair" in second
        assert "whole adapter/merged" in rest[0]


def test_adapters_of_another_kind_than_lora_are_merged_first(home, tmp_path):
    folder = Path(shutil.copytree(home / "yarn adapter", tmp_path / "adapter"))
    changes = {"peft_type": "ADALORA", "rank_pattern": {"q_proj": [True, False]}}
    edit(folder / "adapter_config.json", lambda values: values.update(changes))
    for engine in ("vllm", "sglang"):
        made = exporter(engine)(read_saved(folder))
        assert "merge_and_unload" in made.lines[0] and "peft_type=ADALORA" in made.notes[-1]


def test_adapters_that_start_from_a_part_of_the_base_are_merged_first(home, tmp_path):
    """PEFT takes the part out of the base's weights. An engine would add it to the whole ones."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(home / "base")
    whole = plain.model.layers[0].self_attn.q_proj.weight.detach().clone()
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    model = get_peft_model(plain, config)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert not torch.allclose(layer.base_layer.weight, whole, atol=1e-3), "what an engine loads is the whole weight"
    save(model, tmp_path / "adapter")
    finish(tmp_path / "adapter", extended(home / "base", "yarn"), "yarn")
    for engine in ("vllm", "sglang"):
        made = exporter(engine)(read_saved(tmp_path / "adapter"))
        assert "merge_and_unload" in made.lines[0] and "init_lora_weights=pissa" in made.notes[-1]


PARTS = [
    ({"bias": "all"}, ["vllm", "sglang"]),
    ({"lora_bias": True}, ["vllm", "sglang"]),
    ({"rank_pattern": {"q_proj": 48}}, ["vllm", "sglang"]),
    ({"alpha_pattern": {"q_proj": 48}}, ["vllm", "sglang"]),
    ({"trainable_token_indices": [3]}, ["vllm", "sglang"]),
    ({"use_rslora": True}, ["sglang"]),
    ({"r": 1024}, ["vllm"]),
    ({"bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "r": 512}, []),
]


@pytest.mark.parametrize(("changes", "merged"), PARTS, ids=str)
def test_adapters_that_engines_refuse_or_read_in_part_are_merged_first(home, tmp_path, changes, merged):
    folder = Path(shutil.copytree(home / "yarn adapter", tmp_path / "adapter"))
    edit(folder / "adapter_config.json", lambda values: values.update(changes))
    for engine in ("vllm", "sglang"):
        made = exporter(engine)(read_saved(folder))
        assert ("merge_and_unload" in made.lines[0]) == (engine in merged)
        assert (f"the adapter has {next(iter(changes))}=" in made.notes[-1]) == (engine in merged)


@pytest.mark.parametrize("kind", ["CARTRIDGE", "PROMPT_TUNING"])
def test_adapters_that_cannot_be_merged_are_refused(home, tmp_path, kind):
    folder = Path(shutil.copytree(home / "yarn adapter", tmp_path / "adapter"))
    edit(folder / "adapter_config.json", lambda values: values.update(peft_type=kind))
    for engine in ("vllm", "sglang", "llama.cpp", "mlx", "tgi"):
        with pytest.raises(PoSEError, match=f"peft_type={kind}, which no engine loads"):
            exporter(engine)(read_saved(folder))
    assert exporter("transformers")(read_saved(folder)).lines


def test_names_that_an_engine_would_refuse(home, tmp_path):
    """Ollama takes no spaces, and vLLM and SGLang split NAME=FOLDER at a =."""
    folder = Path(shutil.copytree(home / "yarn adapter", tmp_path / "my lr=1e-4, v2.0"))
    assert exporter("ollama")(read_saved(folder)).lines[-1] == "ollama run my-lr-1e-4-v2.0"
    named = options(exporter("vllm")(read_saved(folder)).lines[0])["--lora-modules"]
    assert json.loads(named) == {"name": "my-lr-1e-4-v2.0", "path": str(folder)}
    named = options(exporter("sglang")(read_saved(folder)).lines[0])["--lora-paths"]
    assert named.split("=", 1) == ["my-lr-1e-4-v2.0", str(folder)]
    plain = options(exporter("vllm")(read_saved(home / "yarn adapter")).lines[0])["--lora-modules"]
    assert plain.split("=") == ["yarn-adapter", str(home / "yarn adapter")]


def test_the_base_s_revision_and_the_rank_are_passed(home, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(home / "yarn adapter", folder)
    edit(folder / "adapter_config.json", lambda values: values.update(
        base_model_name_or_path="some/base", revision="v1.5", r=48))  # fmt: skip
    for engine in ("vllm", "sglang"):
        assert options(exporter(engine)(read_saved(folder)).lines[0])["--revision"] == "v1.5"
    assert options(exporter("vllm")(read_saved(folder)).lines[0])["--max-lora-rank"] == "64"
    assert "'some/base', revision='v1.5', config" in "\n".join(exporter("transformers")(read_saved(folder)).lines)


def test_a_folder_without_a_tokenizer(home, tmp_path, capsys):
    """Of another trainer. An engine that is pointed to it would not start."""
    for name in ("yarn adapter", "yarn"):
        folder = Path(shutil.copytree(home / name, tmp_path / name))
        assert main(["export", str(folder), "--engine", "vllm"]) == 0
        with_one = capsys.readouterr().out
        for file in folder.glob("tokenizer*"):
            file.unlink()
        for engine in ("vllm", "sglang", "transformers"):
            assert main(["export", str(folder), "--engine", engine]) == 0
            shown = capsys.readouterr().out
            assert "--tokenizer" not in shown and "yarn has no tokenizer" in shown.replace(" adapter", "")
        line = f"AutoTokenizer.from_pretrained({str(home / 'base' if 'adapter' in name else folder)!r})"
        assert line in shown
        assert ("--tokenizer" in with_one) == ("adapter" in name) and "has no tokenizer" not in with_one


def test_merge_lines_are_what_they_say(home, tmp_path, monkeypatch):
    """Run as printed, in one process."""
    save_adapter(tmp_path / "adapter", "linear")
    first, second, *_ = exporter("llama.cpp")(read_saved(tmp_path / "adapter")).lines
    python, flag, code = shlex.split(first)
    assert (python, flag) == ("python", "-c")
    exec(code, {})
    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: reload_worker.answer(request))
    assert main(shlex.split(second)[1:]) == 0


@pytest.mark.parametrize(
    ("key", "value", "ignoring"),
    [
        ("beta_fast", 64.0, {"tgi"}),
        ("beta_slow", 2.0, {"tgi"}),
        ("truncate", False, {"tgi", "llama.cpp", "ollama", "mlx"}),
    ],
)
def test_keys_that_an_engine_ignores_are_named(home, tmp_path, key, value, ignoring):
    folder = tmp_path / "model"
    shutil.copytree(home / "yarn", folder)
    saved = read_saved(folder)
    assert not any("another speed" in note for engine in ENGINES for note in exporter(engine)(saved).notes)

    def change(values):
        for form in ("rope_parameters", "rope_scaling"):
            values[form][key] = value

    saved = edited(folder, change)
    told = {name for name in ENGINES for note in exporter(name)(saved).notes if f"ignores {key}={value}" in note}
    assert told == ignoring


@pytest.mark.parametrize("name", ["yarn", "yarn adapter"])
def test_transformers_lines_run(home, name):
    names: dict[str, Any] = {}
    exec("\n".join(exporter("transformers")(read_saved(home / name)).lines), names)
    assert names["model"].config.max_position_embeddings == TARGET
    assert names["tokenizer"].model_max_length == TARGET
    answers = reload_worker.measure(names["model"], json.loads((home / name / "pose_probe.json").read_text()))
    wanted = json.loads((home / name / "pose_probe.json").read_text())["logits"]
    np.testing.assert_allclose(answers["logits"], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("linear", "--rope-scaling linear --rope-scale 8"),
        ("yarn", "--rope-scaling yarn --rope-scale 8 --yarn-orig-ctx 64"),
        ("base", "--rope-freq-base 1000000"),
        ("llama3", "no flags"),
    ],
)
def test_llama_cpp_flags_for_a_plain_base(home, name, flags):
    assert flags in " ".join(exporter("llama.cpp")(read_saved(home / name)).notes)


def test_llama_cpp_refuses_what_its_converter_drops(home):
    with pytest.raises(PoSEError, match=r"'llama'.*rope: yarn"):
        exporter("llama.cpp")(read_saved(home / "yarn-revised"))
    notes = " ".join(exporter("llama.cpp")(read_saved(home / "own attention")).notes)
    assert "ignores attention_factor=1.5" in notes


def test_llama_cpps_own_converter_is_run(home, tmp_path, capsys):
    """A stand-in that writes down its arguments; the real one is run in benchmarks/engines.py."""
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import json, sys\nopen(sys.argv[3], 'w').write(json.dumps(sys.argv[1:]))\n")
    file = tmp_path / "out.gguf"
    command = ["export", str(home / "yarn"), "--engine", "llama.cpp", "--convert", "--llama-cpp", str(tmp_path)]
    assert main([*command, "--output", str(file), "--outtype", "f16"]) == 0
    folder, option, written, *rest = json.loads(file.read_text())
    # Renamed when it is complete.
    assert (folder, option, rest) == (str(home / "yarn"), "--outfile", ["--outtype", "f16"])
    assert Path(written).name == file.name and written != str(file)
    assert f"llama-server -m {file} " in capsys.readouterr().out
    assert main([*command, "--output", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    script.write_text("import sys\nsys.exit('no such architecture')\n")
    file.unlink()
    assert main([*command, "--output", str(file)]) == 2
    assert "no such architecture" in capsys.readouterr().err


def test_ollama_writes_a_modelfile(home):
    assert main(["export", str(home / "linear"), "--engine", "ollama"]) == 0
    assert (home / "linear" / "Modelfile").read_text() == "FROM ./linear.gguf\nPARAMETER num_ctx 512\n"
    elsewhere = exporter("ollama")(replace(read_saved(home / "linear"), gguf=Path("/models/x.gguf")))
    assert elsewhere.files["Modelfile"].startswith("FROM /models/x.gguf\n")
    assert f"-f {home / 'linear' / 'Modelfile'}" in elsewhere.lines[-2]


# -- transformers 4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROPES)
def test_older_form(home, tmp_path, name, capsys):
    command = ["export", str(home / name), "--engine", "transformers", "--form", "4", "--output", str(tmp_path / "old")]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert str(tmp_path / "old") in output and "--form 4" not in output
    assert main([*command[:2], "--engine", "transformers"]) == 0 and "--form 4" in capsys.readouterr().out
    before, after = config_of(home / name), config_of(tmp_path / "old")
    assert "rope_parameters" not in after and after["rope_theta"] == before["rope_parameters"]["rope_theta"]
    scaling = after["rope_scaling"]
    assert scaling is None if name in ("ntk", "base") else scaling == before["rope_parameters"]
    assert after["torch_dtype"] == before["dtype"] and after["max_position_embeddings"] == TARGET
    # transformers 5 names a class that transformers 4 does not know.
    assert json.loads((home / name / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    written = json.loads((tmp_path / "old" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and written["model_max_length"] == TARGET
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == (home / name / "model.safetensors").read_bytes()
    # The folder it was made from is as it was.
    assert config_of(home / name) == before


@pytest.mark.parametrize("engine", ["llama.cpp", "ollama", "tgi"])
def test_a_folder_in_the_newer_form_alone(tmp_path, engine, capsys):
    """Like checkpoints: an engine that reads the older keys would see no extension."""
    folder = tmp_path / "checkpoint-2"
    save_full(folder, "yarn")
    edit(folder / "config.json", lambda values: values.pop("rope_scaling"))
    assert main(["export", str(folder), "--engine", engine]) == 2
    output = capsys.readouterr().err
    assert "no rope_scaling" in output and engine in output and "--form 4 --output FOLDER" in output
    assert main(["export", str(folder), "--engine", "vllm"]) == 0
    assert main(["export", str(folder), "--engine", engine, "--form", "4", "--output", str(tmp_path / "old")]) == 0
    assert config_of(tmp_path / "old")["rope_scaling"]["rope_type"] == "yarn"
    # Plain RoPE with another base needs no such key.
    save_full(tmp_path / "ntk", "ntk")
    edit(tmp_path / "ntk" / "config.json", lambda values: values.pop("rope_scaling", None))
    assert main(["export", str(tmp_path / "ntk"), "--engine", engine]) == 0


def test_older_form_still_loads_in_transformers_5(home, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: reload_worker.answer(request))
    main(["export", str(home / "yarn"), "--engine", "tgi", "--form", "4", "--output", str(tmp_path / "old")])
    report = check.check_folder(tmp_path / "old")
    assert report.passed, str(report)


# -- input that cannot work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nothing", "--engine", "vllm"], ["{tmp}/nothing"]),
        (["{tmp}", "--engine", "vllm"], ["config.json"]),
        (["{home}/yarn", "--engine", "vllm", "--form", "4"], ["--output FOLDER"]),
        (["{home}/yarn", "--engine", "vllm", "--form", "4", "--output", "{home}/base"], ["--output"]),
        (["{home}/yarn", "--engine", "vllm", "--convert"], ["--convert", "--engine vllm"]),
        (["{home}/yarn", "--engine", "vllm", "--output", "{tmp}/x"], ["--output", "/x has no effect"]),
        (["{home}/yarn", "--engine", "llama.cpp", "--outtype", "f16"], ["--outtype f16"]),
        (["{home}/yarn", "--engine", "vllm", "--llama-cpp", "{tmp}"], ["--llama-cpp", "--convert"]),
        (["{home}/yarn", "--engine", "llama.cpp", "--convert", "--llama-cpp", "{tmp}"], ["convert_hf_to_gguf.py"]),
        (
            ["{home}/yarn adapter", "--engine", "llama.cpp", "--convert", "--llama-cpp", "{tmp}"],
            ["is an adapter; merge it first", "merge_and_unload"],
        ),
    ],
    ids=[
        *(
            "no folder",
            "no config",
            "form without output",
            "output in use",
            "convert",
            "output",
            "outtype",
            "llama.cpp",
        ),
        *("no converter", "adapter"),
    ],
)
def test_bad_input(home, tmp_path, capsys, arguments, words):
    assert main(["export", *(each.format(tmp=tmp_path, home=home) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert all(word.format(tmp=tmp_path) in error for word in words), error


def test_a_reader_that_has_enough(home):
    """`pose-plugin export … | head -c1`"""
    import os
    import subprocess

    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pose_plugin", "export", str(home / "yarn"), "--engine", "vllm"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_existing_modelfile_is_not_overwritten(tmp_path, capsys):
    save_full(tmp_path / "my model", "linear")
    file = tmp_path / "my model" / "Modelfile"
    file.write_text("FROM mine\n")
    assert main(["export", str(tmp_path / "my model"), "--engine", "ollama"]) == 0
    out = capsys.readouterr().out
    assert file.read_text() == "FROM mine\n" and f"{file} exists" in out
    assert f"ollama create my-model -f '{file}'" in out


def test_only_weights_are_linked_into_the_older_form(tmp_path):
    save_full(tmp_path / "full", "yarn")
    (tmp_path / "full" / "README.md").write_text("# Mine\n")
    older = tmp_path / "older"
    assert main(["export", str(tmp_path / "full"), "--engine", "tgi", "--form", "4", "--output", str(older)]) == 0
    (older / "README.md").write_text("# Another\n")
    assert (tmp_path / "full" / "README.md").read_text() == "# Mine\n"
    assert (older / "model.safetensors").samefile(tmp_path / "full" / "model.safetensors")


LISTS = {"type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
PUBLISHED = {
    "Phi-3, whose original window is next to its lists": (
        {"model_type": "phi3", "rope_theta": 10000.0, "rope_scaling": LISTS, "original_max_position_embeddings": 64},
        {"rope_scaling.original_max_position_embeddings": 64, "original_max_position_embeddings": 64},
    ),
    "Gemma 3, whose bases are next to its ropes": (
        {
            "model_type": "gemma3_text",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}},
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_stated_next_to_a_rope_counts(tmp_path, name):
    config, wanted = PUBLISHED[name]
    folder, output = tmp_path / "model", tmp_path / "older"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    assert main(["export", str(folder), "--engine", "transformers", "--form", "4", "--output", str(output)]) == 0
    written = config_of(output)
    assert "rope_parameters" not in written
    for path, value in wanted.items():
        assert functools.reduce(lambda values, key: values[key], path.split("."), written) == value


def test_a_base_of_null_counts_as_none(tmp_path, capsys):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": None}
    config = {"model_type": "llama", "max_position_embeddings": 256, "rope_theta": 500000.0, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for words in (["export", "--engine", "llama.cpp"], ["card"]):
        assert main([words[0], str(tmp_path), *words[1:]]) == 0
    assert "no number" in capsys.readouterr().out and read_saved(tmp_path).rope["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    "words", [["check"], ["card"], ["export", "--engine", "vllm"], ["export", "--engine", "ollama"]]
)
def test_beacons_are_for_no_engine(tmp_path, words, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "POSE_PLUGIN_BEACON"}))
    assert main([*words, str(tmp_path)]) == 2
    assert f"{tmp_path} is an Activation Beacon adapter" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["adapter_config.json"]
