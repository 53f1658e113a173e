"""docs/recipe_80k.md, from the first command to the last, on a tiny model and with a small server of questions."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("axolotl", reason="Axolotl is not installed: pip install axolotl")
pytest.importorskip("openai", reason="openai is not installed: pip install openai")

from tests.forked import forked
from tests.integration import example_runs
from tests.integration.axolotl_runs import in_this_process
from tests.synthesize.material import story
from tests.synthesize.server import Server, write_answer

pytestmark = pytest.mark.axolotl

PAGE = example_runs.ROOT / "docs" / "recipe_80k.md"
FILE = "example_configs/llama3-80k/qlora-pose.yaml"
# Every length is divided, in the commands as in the file: windows of 8,192 tokens become 512. Trials become two.
SHRINK = 16


def _lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def _smaller(word: str) -> str:
    """Lengths, from 2048 on, of one argument; a RoPE base is no length."""
    return re.sub(r"(?<![\d=])\d{4,5}\b|(?<=length=)\d+", lambda found: str(int(found[0]) // SHRINK), word)


def test_smaller_lengths():
    said = ["8192,32768,81920", "target_length=81920,theta=200000000", "10", "qlora-80k"]
    assert [*map(_smaller, said)] == ["512,2048,5120", "target_length=5120,theta=200000000", "10", "qlora-80k"]


def _run(line: list[str]) -> int:
    """One command, in this process where it is Python's, so that nothing is imported twice."""
    program, *words = line
    if program == "pose-plugin":
        from pose_plugin.cli.main import main

        return main(words)
    if program == "axolotl":
        from axolotl.cli import merge_lora, train

        in_this_process()
        {"train": train, "merge-lora": merge_lora}[words[0]].do_cli(config=words[1])
        return 0
    if program == "cp":
        shutil.copy(*words)
        return 0
    raise AssertionError(f"a command that this test does not know: {line}")


def _short(prompt: str) -> str:
    """The server's answer in few tokens: a window of 512 has little room beside a document."""
    answer = json.loads(write_answer(prompt))
    for number, each in enumerate(answer["questions"]):
        each |= {"question": f"ba {number}", "answer": "bo"}
    return json.dumps(answer)


def _prepare(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model under its own name, the file, and documents."""
    values = example_runs.read(FILE.removeprefix("example_configs/"))
    name = values["base_model"]
    monkeypatch.setitem(example_runs.BASES, name, dataclasses.replace(example_runs.BASES[name], shrink=SHRINK))
    forked(example_runs.write_tiny, place / name, name)
    small = example_runs.shrunk(values, place / name, place, place)
    # Where the commands of the page look for them.
    small |= {"base_model": name, "output_dir": values["output_dir"]}
    for each in small["datasets"]:
        each["path"] = Path(each["path"]).name
    (place / FILE).parent.mkdir(parents=True)
    (place / FILE).write_text(json.dumps(small))
    (place / "documents").mkdir()
    for number in range(4):
        (place / "documents" / f"{number}.txt").write_text(story(number, 600))


def test_every_command(tmp_path, monkeypatch):
    _prepare(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    printed: dict[str, str] = {}
    with Server(write=_short) as server:
        for language, text in re.findall(r"^```(bash|python)\n(.*?)^```", page, re.M | re.S):
            if language == "python":
                exec(text, {})
                continue
            for line in _lines(text):
                words = [_smaller(word) for word in shlex.split(line)]
                if "--trials" in words:
                    words[words.index("--trials") + 1] = "2"
                if words[0] == "pip":  # what .ci/environment has done
                    continue
                if words[0] == "export":
                    for each in words[1:]:
                        monkeypatch.setenv(*each.split("=", 1))
                    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
                    continue
                outcome = forked(_run, words)
                assert not outcome.value, (line, outcome.output[-3000:])
                printed[" ".join(words[:2])] = outcome.output
    results(tmp_path, printed)


def results(place: Path, printed: dict[str, Any]) -> None:
    """What the page promises of the files."""
    rows = [json.loads(line) for line in (place / "data" / "train.jsonl").read_text().splitlines()]
    assert rows and all(row["messages"][0]["role"] == "user" for row in rows)
    out = place / "outputs" / "llama3-80k-pose"
    config = json.loads((out / "merged" / "config.json").read_text())
    assert (config["rope_theta"], config["max_position_embeddings"]) == (2e8, 81920 // SHRINK)
    assert "vllm serve" in printed["pose-plugin export"] and str(81920 // SHRINK) in printed["pose-plugin export"]
    judged = json.loads((place / "judged" / "results.json").read_text())["models"]
    assert len(judged) == 3 and all(model["passkey"] and model["topics"] for model in judged)
    assert "Passkey" in (out / "merged" / "README.md").read_text()
    assert os.path.getsize(place / "texts.jsonl") > 1000
