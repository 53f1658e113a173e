"""Every snippet and command of README and docs is run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from pose_plugin.cli.main import main
from tests.forked import forked
from tests.models import make_llama, make_tokenizer
from tests.pages import PAGES, ROOT, blocks, commands


def test_options_page_is_the_settings():
    spec = importlib.util.spec_from_file_location("make_options", ROOT / "docs" / "make_options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == module.page()


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                # The site holds the folder docs only, so a link out of it would be broken there.
                assert page.parent.name != "docs" or not target.startswith(".."), f"{page.name}: {target}"


def test_the_numbers_of_random_inputs_and_kills():
    def number(file, pattern):
        (found,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))
        return f"{int(found):,}"

    inputs, more_inputs = number("tests/fuzz/settings.py", r'EXAMPLES", "(\d+)"'), number("Makefile", r"EXAMPLES=(\d+)")
    kills, more_kills = number("tests/kill.py", r'POSE_KILLS", "(\d+)"'), number("Makefile", r"POSE_KILLS=(\d+)")
    for name in ("docs/verified.md", "CONTRIBUTING.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        assert f"{inputs} inputs per test" in page and more_inputs in page, name
        assert re.search(rf"{kills} (times|moments)", page) and re.search(rf"{more_kills} (times|in `make)", page), name


def test_readme_trl_snippet(tmp_path):
    pytest.importorskip("trl")
    (snippet,) = blocks(ROOT / "README.md", "python")

    def case():
        import trl
        from datasets import Dataset

        make_llama(max_position_embeddings=2048).save_pretrained(tmp_path / "base")
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(tmp_path / "base")
        args = trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_length=2048,
            max_steps=1,
            per_device_train_batch_size=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
        )
        names = {
            "base": str(tmp_path / "base"),
            "tokenizer": tokenizer,
            "args": args,
            "dataset": Dataset.from_list([{"text": "w9 w10 w11 w12 " * 10}] * 4),
            "SFTTrainer": trl.SFTTrainer,
        }
        exec(snippet, names)
        names["trainer"].train()
        names["trainer"].save_model()
        return json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"]

    assert forked(case).value == 32768


def numberless(text: str) -> str:
    """Return a text with one mark for each number and run of spaces."""
    return re.sub(r"[\d.]*\d(e-?\d+)?", "#", re.sub(r" +", " ", text))


def test_snippets_of_the_trl_page(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    whole, adapter = (text.replace("=1000", "=1") for text in blocks(ROOT / "docs" / "trl.md", "python"))
    monkeypatch.chdir(tmp_path)

    def case():
        from datasets import Dataset

        make_llama(max_position_embeddings=2048).save_pretrained("base")
        make_tokenizer().save_pretrained("base")
        names = {"base": "base", "dataset": Dataset.from_list([{"text": "w9 w10 w11 w12 " * 10}] * 4)}
        exec(whole, names)
        names["model"] = type(names["model"]).from_pretrained("base", config=names["config"])
        exec(adapter, names)
        names["trainer"].train()
        names["trainer"].save_model()

    printed = numberless(forked(case).output)
    for folder in ("long", "adapter"):
        config = json.loads((tmp_path / "outputs" / folder / "config.json").read_text(encoding="utf-8"))
        assert config["max_position_embeddings"] == 32768
        assert (tmp_path / "outputs" / folder / "pose.json").exists()
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(\[pose_plugin\].*?)^```", page, re.M | re.S)
    assert len(shown.splitlines()) == 6
    for line in shown.splitlines():
        assert numberless(line.partition("{")[0]) in printed
    for command in blocks(ROOT / "docs" / "trl.md", "bash")[-1].splitlines():
        # Short prompts, so that it takes seconds.
        smaller = ["--lengths", "64,128", "--trials", "1"] if "evaluate" in command else []
        assert main([*shlex.split(command)[1:], *smaller]) == 0
    peft = json.loads((tmp_path / "outputs" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert peft["modules_to_save"] == ["input_layernorm", "post_attention_layernorm", "norm"]


def test_reload_snippet_loads_model_and_adapter(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    (snippet,) = blocks(ROOT / "docs" / "how.md", "python")

    def case():
        import os

        from peft import LoraConfig, get_peft_model

        from pose_plugin.checkpoints import complete_folder
        from pose_plugin.config import parse_settings
        from pose_plugin.rope import extend_context

        os.chdir(tmp_path)
        plain = make_llama()
        plain.save_pretrained("base")
        settings = parse_settings({"target_length": 512})
        extended = type(plain).from_pretrained("base", config=extend_context(plain.config, 512))
        extended.save_pretrained("outputs/full")
        complete_folder("outputs/full", extended.config, settings)
        get_peft_model(extended, LoraConfig(target_modules=["q_proj"])).save_pretrained("outputs/adapter")
        complete_folder("outputs/adapter", extended.config, settings)
        names: dict = {}
        exec(snippet, names)
        return names["model"].config.max_position_embeddings

    assert forked(case).value == 512


def test_first_page_of_the_site_shows_the_snippets_of_the_readme():
    # The README's are run above.
    for language in ("yaml", "python"):
        assert blocks(ROOT / "docs" / "index.md", language) == blocks(ROOT / "README.md", language)


def test_api_page_has_every_public_name():
    import pose_plugin

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: (pose_plugin\.[\w.]+)$", page, re.M)
    assert sorted(name.rpartition(".")[2] for name in named) == sorted(pose_plugin.__all__)
    for name in named:
        module, _, attribute = name.rpartition(".")
        if attribute != "PosePlugin" or importlib.util.find_spec("axolotl"):
            assert getattr(importlib.import_module(module), attribute) is getattr(pose_plugin, attribute)
            # The page takes only "Examples:" for a section of code.
            assert "Example:" not in (getattr(pose_plugin, attribute).__doc__ or "")


def test_badges_of_the_readme_are_those_of_the_package():
    from urllib.parse import unquote

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    badges = dict(re.findall(r"img\.shields\.io/badge/(\w+)-(.+)-\w+\)", readme))
    (licence,) = re.findall(r'^license = "(.+)"', project, re.M)
    (python,) = re.findall(r'^requires-python = ">=(.+)"', project, re.M)
    assert {name: unquote(text).replace("--", "-") for name, text in badges.items()} == {
        "licence": licence,
        "python": f"{python}+",
    }


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / ".ci" / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r": (\w+\.md)$", navigation, re.M)) == sorted(
        page.name for page in (ROOT / "docs").glob("*.md")
    )


def test_coverage_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = commands("pose-plugin coverage")
    assert lines
    for line in lines:
        assert main(line[1:]) == 0
        assert "distance" in capsys.readouterr().out


def test_plan_commands(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from tests.plan.test_architecture import LLAMA3_8B

    (tmp_path / "example_configs").symlink_to(ROOT / "example_configs")
    (tmp_path / "Meta-Llama-3-8B-Instruct").mkdir()
    (tmp_path / "Meta-Llama-3-8B-Instruct" / "config.json").write_text(json.dumps(LLAMA3_8B))
    monkeypatch.chdir(tmp_path)
    # The tutorial's command names a base on the Hub and has its own test.
    lines = [line for line in commands("pose-plugin plan") if "--base" in line or "quickstart" in line[2]]
    assert len(lines) == 5
    printed = ""
    for line in lines:
        # The page shows the quick start's numbers.
        assert main([*line[1:], *([] if "quickstart" in line[2] else ["--draws", "50"])]) == 0
        printed += capsys.readouterr().out
        assert "quickstart" in line[2] or "theta" in printed
    assert (tmp_path / "plan.png").exists()
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\n((?:Window| +distance) .*?)^```", page, re.M | re.S)
    assert len(shown) == 3
    for line in "".join(shown).splitlines():
        assert line in printed


def test_quick_start_commands_name_files_that_exist():
    for line in commands("python example_configs") + commands("axolotl train example_configs"):
        script = next(word for word in line if word.startswith("example_configs"))
        assert (ROOT / script).exists(), line


def test_readme_yaml_is_a_valid_block():
    import yaml

    from pose_plugin.config import parse_settings

    (text,) = blocks(ROOT / "README.md", "yaml")
    values = yaml.safe_load(text)
    assert values["plugins"] == ["pose_plugin"]
    settings = parse_settings({**values["pose"], "train_length": values["sequence_len"]})
    assert (settings.train_length, settings.target_length, settings.rope.type) == (2048, 32768, "yarn")


def test_training_loop_snippet():
    (snippet,) = blocks(ROOT / "docs" / "questions.md", "python")

    def case():
        from torch.utils.data import DataLoader

        rows = [{"input_ids": list(range(10 + i, 40 + i))} for i in range(4)]
        names = {
            "tokenizer": make_tokenizer(),
            "model": make_llama(max_position_embeddings=2048),
            "dataset": rows,
            "DataLoader": DataLoader,
        }
        exec(snippet, names)
        farthest = int(names["batch"]["position_ids"].max())
        plain = int(next(iter(names["judged"]))["position_ids"].max())
        return names["loss"].isfinite().item(), farthest > 29, plain

    assert forked(case).value == (True, True, 29)


def test_evaluate_command_of_readme_is_complete(tmp_path, monkeypatch):
    # The root may contain a trained outputs/model.
    monkeypatch.chdir(tmp_path)
    lines = [line for line in commands("pose-plugin evaluate") if "outputs/model" in line]
    assert lines
    for line in lines:
        # All arguments are accepted; only the model is missing.
        assert main(line[1:]) == 2


def test_unsloth_snippet(tmp_path, monkeypatch):
    (snippet,) = blocks(ROOT / "docs" / "verified.md", "python")
    monkeypatch.chdir(tmp_path)
    make_llama(max_position_embeddings=2048).save_pretrained("base")
    names = {"base": "base"}
    exec(snippet, names)
    assert json.loads(Path(names["folder"], "config.json").read_text())["max_position_embeddings"] == 32768
