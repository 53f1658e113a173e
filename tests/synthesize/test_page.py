"""docs/synthesize.md: its commands run, and its defaults are those of the command."""

from __future__ import annotations

import re
import shlex

import pytest

from pose_plugin.cli import synthesize
from pose_plugin.cli.main import main
from pose_plugin.cli.parser import Parser
from pose_plugin.synthesize.select import assign, collect
from pose_plugin.synthesize.settings import Settings, parse_settings
from pose_plugin.utils.errors import PoSEError
from tests.pages import ROOT, blocks
from tests.synthesize.material import byte_tokenizer, story
from tests.synthesize.runs import lines, manifest
from tests.synthesize.server import Server

PAGE = ROOT / "docs" / "synthesize.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the files that the page's commands name."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("page")
    byte_tokenizer().save_pretrained(folder / "my-model")
    (folder / "documents").mkdir()
    for number, length in enumerate([9000, 12000, 15000, 30000, 1000, 1200]):
        (folder / "documents" / f"{number}.txt").write_text(story(number, length))
    return folder


def page_lines() -> list[list[str]]:
    text = "".join(blocks(PAGE, "bash")).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("pose-plugin synthesize")]


def test_every_command_runs(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    found = page_lines()
    assert len(found) >= 2
    with Server() as server:
        for line in found:
            here = [server.url if word.startswith("http://") else word for word in line[1:]]
            assert main([*here, "--quiet"]) == 0
            assert "requests: at most " in capsys.readouterr().out
            # After the plan, the page says, run the same command without --plan.
            if "--plan" in here:
                here.remove("--plan")
                assert main([*here, "--quiet"]) == 0
            made = folder / here[here.index("--output") + 1]
            assert lines(made / "train.jsonl") and manifest(made)["state"] == "finished"
            assert {path.name for path in made.iterdir()} == set(
                re.findall(r"^\| `(\S+\.jsonl?)`", PAGE.read_text(), re.M)
            )


def test_the_yaml_is_what_axolotl_was_given():
    yaml = pytest.importorskip("yaml")
    (block,) = blocks(PAGE, "yaml")
    assert yaml.safe_load(block) == {
        "datasets": [{"path": "data/train.jsonl", "ds_type": "json", "type": "chat_template"}]
    }


def test_the_recipes_rows_at_full_length(tmp_path):
    """The command of docs/recipe_80k.md makes rows of 64K to 80K tokens only, from documents of all lengths."""
    pytest.importorskip("sklearn")
    (line,) = blocks(ROOT / "docs" / "recipe_80k.md", "sh")
    words = shlex.split(line.replace("\\\n", " "))[2:]
    # Short documents on several subjects, none of which fills a row by itself.
    lengths = [70000, 72000, 68000, 30000, 5700, 500, *[2500] * 40, *[3000] * 40]
    for number, length in enumerate(lengths):
        text = story(number, length)
        (tmp_path / f"{number}.txt").write_text(text if number % 3 else "".join(map(other, text)))
    parser = Parser()
    synthesize.add_arguments(parser)
    given = vars(parser.read([str(tmp_path), *words[1:]]))
    settings = parse_settings(
        {name: given[name] for name in Settings.model_fields if given[name] is not None}, given["recipe"]
    )
    found = collect(settings, byte_tokenizer())
    items = assign(found, settings)
    assert {item.task for item in items} == {"single", "multi", "compare"}
    assert all(65536 <= item.tokens <= 79360 for item in items)
    assert sum(item.task == "compare" for item in items) == 3
    assert found.dropped["short, in no group of 65536 tokens (--group-tokens)"] > 0


def other(letter: str) -> str:
    """Another language: letters moved by 13."""
    return chr((ord(letter) - 84) % 26 + 97) if letter.isalpha() and letter.islower() else letter


def test_options_take_precedence_over_a_recipe(tmp_path):
    values = {"inputs": (tmp_path,), "output": tmp_path, "tokenizer": "t", "model": "m"}
    settings = parse_settings(values | {"group_size": "5", "min_tokens": "70k"}, "80k")
    assert (settings.window, settings.group_size, settings.min_tokens) == (81920, 5, 71680)
    with pytest.raises(PoSEError, match="--window is missing"):
        parse_settings(values)
    with pytest.raises(PoSEError, match="--group-tokens 65536 is above 32768"):
        parse_settings(values | {"request_tokens": "32k"}, "80k")
    assert parse_settings(values | {"request_tokens": "32k", "tasks": "single,multi"}, "80k").request_tokens == 32768
