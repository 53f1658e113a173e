"""Every command of every page is one that its program takes. Tests of single pages run the commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from pose_plugin.cli.main import add_arguments
from pose_plugin.cli.parser import Parser
from tests.models import make_llama, save
from tests.pages import PAGES, ROOT, blocks

OTHERS = (ROOT / "CONTRIBUTING.md", ROOT / "example_configs" / "README.md", *(ROOT / "benchmarks").rglob("*.md"))
# Folders and files that a reader has and the repository has not.
PLACES = ("config.yaml", "outputs/", "data/train.jsonl")
LAUNCHERS = ("accelerate launch", "torchrun")


def page_commands() -> list[str]:
    """Return every command line of all pages."""
    texts = [text for page in (*PAGES, *OTHERS) for language in ("bash", "sh") for text in blocks(page, language)]
    # The files of example_configs begin with what to install for them.
    files = [path for ending in ("yaml", "py") for path in (ROOT / "example_configs").rglob(f"*.{ending}")]
    texts += re.findall(r"^#? ?Run: +(pip install .+)$", "\n".join(path.read_text("utf-8") for path in files), re.M)
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return sorted(set(lines))


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name for line in re.findall(r"^([a-z.0-9 -]+):", makefile, re.M) for name in line.split()}


def extras() -> set[str]:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = ", table, re.M))


def check(words: list[str]) -> None:
    """Raise AssertionError or PoSEError if a program does not take a command, or a file of it is missing."""
    match words:
        case ["pose-plugin" | "pose_plugin", name, *rest]:
            parser = Parser()
            add_arguments(name, parser)
            parser.read(rest)
        case ["axolotl", "pose", *rest]:
            check(["pose-plugin", *rest])
        case ["axolotl", "train" | "merge-lora", file, *_]:
            assert file in PLACES or (ROOT / file).is_file()
        case ["pip", "install", *what]:
            own = [re.fullmatch(r"\.(?:\[([\w,]+)\])?", each) for each in what]
            assert all(set((each[1] or "").split(",")) - {""} <= extras() for each in own if each)
            # Nothing is published under this name yet.
            assert not any(each.startswith("pose-plugin") for each in what)
        case ["make", target]:
            assert target in targets()
        case ["python", "-c", code]:
            compile(code, "page", "exec")
        case ["python", script, *_]:
            assert (ROOT / script).is_file()
        case [".ci/with", _, "pytest", file]:
            assert (ROOT / file).is_file()
        case ["accelerate" | "torchrun", *_]:
            for word in words:
                assert "/" not in word or word.startswith(PLACES) or (ROOT / word).is_file()
            if "pose_plugin" in words:
                check(words[words.index("pose_plugin") :])
        case ["vllm" | "llama-server" | "transformers", *_]:
            pass  # inference engines; tests/evaluation/test_served.py starts the last two
        case _:
            assert words[0] in ("git", "cp", "export", ".ci/with")


@pytest.mark.parametrize("line", page_commands())
def test_the_program_takes_it(line):
    words = shlex.split(line, comments=True)
    if words:
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "pose-plugin plan --no-such-option",
        "pose-plugin planned config.yaml",
        'pip install "pose-plugin[axolotl]"',
        'pip install ".[axolotls]"',
        "make everything",
        "python example_configs/missing.py",
        "accelerate launch --config_file example_configs/accelerate/missing.yaml",
        "conda install pose-plugin",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises(Exception):  # noqa: B017 - a missing key, a missing file or the parser's own error
        check(shlex.split(line))


def test_the_integration_page(tmp_path, monkeypatch):
    """`axolotl pose plan` reads the block of docs/axolotl.md in a config."""
    testing = pytest.importorskip("click.testing")
    from pose_plugin.cli.axolotl import pose

    page = ROOT / "docs" / "axolotl.md"
    (block,) = blocks(page, "yaml")
    (line,) = [text for text in blocks(page, "bash") if text.startswith("axolotl pose")]
    monkeypatch.chdir(tmp_path)
    save(make_llama(max_position_embeddings=2048), "base")
    values = {"base_model": "base", "max_steps": 10, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    Path("config.yaml").write_text(yaml.safe_dump(values) + block)
    shown = testing.CliRunner().invoke(pose, [*line.split()[2:], "--draws", "50"])
    assert shown.exit_code == 0 and "trained: 2048 tokens, target: 32768" in shown.output, shown.output


@pytest.mark.parametrize("text", sorted({text for page in PAGES for text in blocks(page, "yaml")}))
def test_axolotl_and_the_block_know_each_key_of_a_yaml(text):
    from pose_plugin.config import parse_settings
    from pose_plugin.plan.config_reader import unknown_keys

    values = yaml.safe_load(text)
    assert unknown_keys(values) == []
    if "pose" in values:
        assert parse_settings({"train_length": values.get("sequence_len", 2048), **values["pose"]})


def test_prose_fits_into_120_columns():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        # Tables, pictures and the line below a table, which a script has written, cannot be broken.
        prose = [line for line in text.splitlines() if not re.match(r"[|!<]|\d{4}-\d\d-\d\d, ", line)]
        assert [line for line in prose if len(line) > 120] == [], page.name
