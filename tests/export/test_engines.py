"""What engines take from a folder: the rules agree with the engines' sources, and with an independent computation."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pose_plugin.checkpoints.saved import read_saved
from pose_plugin.cli.main import main
from pose_plugin.export import exporter
from pose_plugin.export.engines import RULES, Rule, rules_of, taken
from pose_plugin.rope.kinds import yarn_attention_factor
from pose_plugin.utils.errors import PoSEError
from tests.export.test_saved_format import FILES

FACTS = json.loads((Path(__file__).parents[2] / "benchmarks/results/engine_facts.json").read_text())
# Names in the sources that stand for kinds of ours, or that a saved folder never has.
ALIASES = {"su", "deepseek_yarn", "deepseek_llama_scaling"}
READ_BY_DEEPSEEK = {"apply_yarn_scaling", "extrapolation_factor"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A LoRA adapter 64 → 512 with yarn, its config included; no weights."""
    for name, values in FILES.items():
        (tmp_path / name).write_text(json.dumps(values))
    return tmp_path


def edit(folder: Path, name: str, **changes: Any) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | changes))


def with_rope(folder: Path, **rope: Any) -> None:
    edit(folder, "config.json", rope_parameters=rope, rope_scaling=rope, rope_theta=rope["rope_theta"])


def full(folder: Path) -> Path:
    (folder / "adapter_config.json").unlink()
    return folder


def rule_for(engine: str, version: str) -> Rule:
    if engine != "vllm":
        return rules_of(engine)[0]
    newer, older = rules_of("vllm")
    return newer if tuple(map(int, version.split("."))) >= (0, 30) else older


@pytest.mark.parametrize("wheel", FACTS)
def test_a_rule_is_what_the_source_says(wheel):
    engine, version = wheel.split()
    rule, read = rule_for({"mlx_lm": "mlx"}.get(engine, engine), version), FACTS[wheel]
    assert version in rule.read_in
    assert rule.yarn_keys == set(read["yarn keys"]) - READ_BY_DEEPSEEK
    assert rule.kinds | rule.dropped <= set(read["kinds"]) | {"default"} or engine == "sglang"
    if engine == "mlx_lm":
        assert rule.older is not read["llama reads rope_parameters"]
        return
    assert list(rule.length_keys) == read["length keys"]
    assert read["no DoRA"] and read["nested overrides"]
    if engine == "vllm":
        as_written = set(read["as written"]) - ALIASES
        assert rule.multiplied == {"default", "linear", "dynamic", "proportional", "yarn", "longrope", "llama3"} - (
            as_written | {"yarn"}
        )
        assert ("yarn" in rule.from_original) is read["yarn from original"] is ("yarn" not in as_written)
        assert rule.tokenizer is read["tokenizer counts"]
    else:
        assert read["original window counts as factor 1"] and "yarn" not in rule.multiplied


def test_the_window_of_yarn_depends_on_the_version_of_vllm(folder):
    """A foreign folder: its maximum is not original × factor."""
    edit(folder, "config.json", max_position_embeddings=400)
    saved = read_saved(full(folder))
    newer, older = (taken(rule, saved).default for rule in rules_of("vllm"))
    assert (newer, older) == (400, 512)
    # The tokenizer counts for the newer rule; the older one replaces the length afterwards.
    edit(folder, "tokenizer_config.json", model_max_length=300)
    newer, older = (taken(rule, read_saved(folder)).default for rule in rules_of("vllm"))
    assert (newer, older) == (300, 512)


def test_the_table_of_cos_and_sin_must_reach_the_maximum(folder):
    edit(folder, "config.json", max_position_embeddings=1024)
    edit(folder, "tokenizer_config.json", model_max_length=1024)
    with pytest.raises(PoSEError, match=r"512 .*max_position_embeddings=1024"):
        exporter("vllm")(read_saved(full(folder)))


@pytest.mark.parametrize("engine, expected", [("vllm", 128), ("sglang", 128), ("transformers", 512)])
def test_another_length_in_the_config_counts(folder, engine, expected):
    edit(folder, "config.json", seq_length=128, rope_parameters=FILES["config.json"]["rope_parameters"])
    assert taken(rules_of(engine)[0], read_saved(folder)).most == expected


def test_vllm_takes_the_length_of_command_r_before_all_others(folder):
    edit(folder, "config.json", model_max_length=256)
    edit(folder, "config.json", max_position_embeddings=64, rope_scaling=None, rope_parameters=None)
    saved = read_saved(full(folder))
    assert [taken(rule, saved).default for rule in (*rules_of("vllm"), *rules_of("transformers"))] == [256, 256, 64, 64]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.engine} {rule.versions}")
def test_frequencies_of_a_saved_yarn_folder_are_right_in_every_engine(folder, rule):
    saved = read_saved(full(folder))
    frequencies, scale = taken(rule, saved).frequencies(dim=16, maximum=512)
    wanted, right = taken(RULES[0], saved).frequencies(dim=16, maximum=512)
    np.testing.assert_allclose(frequencies, wanted)
    assert scale == pytest.approx(right)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.engine} {rule.versions}")
def test_which_engines_read_another_attention_factor(folder, rule):
    rope = FILES["config.json"]["rope_parameters"] | {"attention_factor": 1.5}
    with_rope(folder, **rope)
    _, scale = taken(rule, read_saved(full(folder))).frequencies(dim=16, maximum=512)
    reads = rule.engine == "transformers" or (rule.engine, rule.versions) == ("vllm", "≥ 0.30")
    assert scale == pytest.approx(1.5 if reads else yarn_attention_factor(8.0))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.engine} {rule.versions}")
def test_which_engines_read_mscale(folder, rule):
    """As Ministral 3 publishes it: the two cancel, and nothing scales cos and sin."""
    rope = {key: value for key, value in FILES["config.json"]["rope_parameters"].items() if key != "attention_factor"}
    with_rope(folder, **rope, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
    edit(folder, "config.json", model_type="ministral3")
    saved = read_saved(full(folder))
    _, scale = taken(rule, saved).frequencies(dim=16, maximum=512)
    # llama.cpp reads it for this model type only, in code of its own.
    ignored = (rule.engine, rule.versions) == ("vllm", "< 0.30") or rule.engine == "llama.cpp"
    assert scale == pytest.approx(yarn_attention_factor(8.0) if ignored else 1.0)
    notes = " ".join(exporter(rule.engine)(saved).notes)
    assert ("mscale" in notes) is (rule.engine == "vllm")
    if rule.engine == "vllm":
        words = shlex.split(exporter("vllm")(saved).lines[0])
        passed = json.loads(words[words.index("--hf-overrides") + 1])["rope_parameters"]
        assert passed["attn_factor"] * yarn_attention_factor(8.0) == pytest.approx(1.0)
    edit(folder, "config.json", model_type="llama")
    notes = " ".join(exporter(rule.engine)(read_saved(folder)).notes)
    assert ("mscale" in notes) is (rule.engine in ("vllm", "llama.cpp"))


@pytest.mark.parametrize("engine", ["llama.cpp", "ollama"])
@pytest.mark.parametrize(
    "model_type, kind, refused",
    [
        ("cohere", "yarn", "cohere.*rope_type=yarn would be served at the base's frequencies"),
        ("cohere", "default", None),
        ("ministral3", "linear", "stops at model type 'ministral3' with rope_type=linear"),
        ("ministral3", "yarn", None),
        ("llama", "yarn", None),
    ],
)
def test_kinds_that_a_converter_drops_for_one_model_type(folder, engine, model_type, kind, refused):
    rope = FILES["config.json"]["rope_parameters"] if kind == "yarn" else {"rope_type": kind, "rope_theta": 1e4}
    with_rope(folder, **rope, **({"factor": 8.0} if kind == "linear" else {}))
    edit(folder, "config.json", model_type=model_type)
    saved = read_saved(full(folder))
    if refused is None:
        assert exporter(engine)(saved).lines
        return
    with pytest.raises(PoSEError, match=refused):
        exporter(engine)(saved)


def test_linear_scaling_is_lost_in_tgi(folder):
    with_rope(folder, rope_type="linear", rope_theta=10000.0, factor=8.0)
    saved = read_saved(full(folder))
    found = taken(rules_of("tgi")[0], saved)
    assert found.dropped == "linear" and found.frequencies(16, 512)[0][0] == 1.0
    with pytest.raises(PoSEError, match="rope_type=linear"):
        exporter("tgi")(saved)


def test_readers_of_older_keys_lose_a_rope_that_only_the_newer_form_has(folder):
    edit(folder, "config.json", rope_scaling=None)
    saved = read_saved(full(folder))
    for rule in RULES:
        assert (taken(rule, saved).rope["rope_type"] == "yarn") is not rule.older


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("reason", ["use_dora", "modules_to_save"])
def test_adapters_that_engines_do_not_load_are_merged(folder, engine, reason):
    edit(folder, "adapter_config.json", **{reason: True if reason == "use_dora" else ["embed_tokens"]})
    first, second, third = exporter(engine)(read_saved(folder)).lines
    assert "merge_and_unload" in first and "--repair" in second and "lora" not in third


@pytest.mark.parametrize("engine, option", [("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")])
def test_the_rope_of_a_multimodal_base_is_passed_in_its_text_config(folder, tmp_path, engine, option):
    base = tmp_path / "base"
    base.mkdir()
    text = {"model_type": "qwen3_5_text", "max_position_embeddings": 64}
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    edit(folder, "adapter_config.json", base_model_name_or_path=str(base))
    (line,) = exporter(engine)(read_saved(folder)).lines
    words = shlex.split(line)
    passed = json.loads(words[words.index(option) + 1])
    assert passed["text_config"]["max_position_embeddings"] == 512
    assert passed["text_config"]["rope_parameters"]["factor"] == 8.0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "ollama", "mlx", "tgi", "transformers"])
def test_a_foreign_folder_is_exported_with_what_is_unknown_stated(folder, engine, capsys):
    for name in ("pose.json", "pose_probe.json"):
        (folder / name).unlink()
    assert main(["export", str(full(folder)), "--engine", engine]) == 0
    assert "has no pose.json" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("export", "--engine", "vllm"), ("check",)])
@pytest.mark.parametrize("theta", [[5e6, 1e4], "a lot"])
def test_a_base_per_layer_is_no_fault_of_the_file(folder, command, theta, capsys):
    edit(folder, "config.json", rope_theta=theta)
    assert main([command[0], str(full(folder)), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert f"config.json: rope_theta={theta}" in said or f"config.json: rope_theta={theta!r}" in said
    per_layer = "has one value per layer. The file may be right, but this package does not support such models"
    assert (per_layer in said) is isinstance(theta, list) is not ("correct the file" in said)


def test_an_untrained_folder_is_exported_with_a_warning(folder, capsys):
    edit(folder, "pose.json", trained={"steps": 0})
    assert main(["export", str(folder), "--engine", "vllm"]) == 0
    assert "WARNING: pose.json has steps=0" in capsys.readouterr().out
