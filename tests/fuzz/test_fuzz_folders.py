"""Damaged folders and every command that reads one: a sentence or a result, no traceback, no half-written file."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pose_plugin.checkpoints import check
from pose_plugin.cli.main import main
from tests.export.test_saved_format import FILES
from tests.fuzz.settings import fuzz

pytest.importorskip("huggingface_hub")

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=8),
    st.just("x" * 100_000),
    st.just([[]]),
    st.lists(st.integers(-2, 5000), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "x"]), st.integers(), max_size=2),
)
README = "---\nlicense: mit\ntags: [mine]\n---\n# Mine\n"
COMMANDS = [
    *(["export", "{0}", "--engine", engine] for engine in ("vllm", "sglang", "ollama", "mlx", "tgi", "transformers")),
    ["export", "{0}", "--engine", "tgi", "--form", "4", "--output", "{0}/older"],
    ["card", "{0}"],
    ["check", "{0}"],
    ["check", "{0}", "--like", "{0}", "--repair"],
    ["doctor", "{0}"],
    ["doctor", "{0}", "--mend", "{0}/mended"],
    ["plan", "--base", "{0}", "--target-length", "2k", "--train-length", "32", "--draws", "3"],
    *(
        ["init", "{0}", "--target-length", "2k", "--data", "{0}/rows.jsonl", "--output", f"{{0}}/c.{ending}"]
        for ending in ("yaml", "py")
    ),
]


def saved() -> dict[str, str]:
    """The text files of a saved adapter."""
    texts = {name: json.dumps(values) for name, values in FILES.items()}
    return texts | {"generation_config.json": '{"max_length": 64}', "README.md": README}


def model_with(**changes: str) -> dict[str, bytes]:
    """The files of a saved model, with other texts in some of them; `config_json` names config.json."""
    texts = saved() | {name.replace("_json", ".json").replace("_md", ".md"): text for name, text in changes.items()}
    del texts["adapter_config.json"]
    return {name: text.encode() for name, text in texts.items()} | {"model.safetensors": b""}


@st.composite
def damaged(draw) -> dict[str, bytes]:
    """The files of a saved adapter or model, one or two of them damaged."""
    texts = saved()
    if draw(st.booleans()):
        del texts["adapter_config.json"]
    files = {name: text.encode() for name, text in texts.items()}
    files |= {"model.safetensors": b"", "adapter_model.safetensors": b""}
    for name in draw(st.lists(st.sampled_from(sorted(texts)), min_size=1, max_size=2, unique=True)):
        way = draw(st.sampled_from(["value", "value", "value", "cut", "bytes", "gone", "deep"]))
        if way == "value" and name != "README.md":
            values = json.loads(texts[name])
            place: Any = values
            for _ in range(draw(st.integers(0, 2))):
                inner = [value for value in place.values() if isinstance(value, dict) and value]
                place = draw(st.sampled_from(inner)) if inner else place
            place[draw(st.sampled_from(sorted(place)))] = draw(VALUES)
            files[name] = json.dumps(values).encode()
        elif way == "value":
            key = draw(st.sampled_from(["tags", "datasets", "base_model", "license", "library_name"]))
            files[name] = f"---\n{key}: {json.dumps(draw(VALUES))}\n---\n# Mine\n".encode()
        elif way == "cut":
            files[name] = files[name][: draw(st.integers(0, len(files[name])))]
        elif way == "bytes":
            files[name] = draw(st.binary(max_size=20))
        elif way == "deep":
            files[name] = b'{"a":' * 5000
        else:
            del files[name]
    return files


LONG_NAME = json.dumps(FILES["adapter_config.json"] | {"base_model_name_or_path": "x" * 10_000}).encode()


@fuzz(cost=2)
@example(files=model_with(README_md="---\ntags: false\n---\n# Mine\n"), command=COMMANDS[-1])
@example(
    files=model_with(config_json=json.dumps(FILES["config.json"]).replace("yarn", "x" * 10_000)), command=COMMANDS[0]
)
@example(
    files=model_with(config_json=saved()["config.json"].replace("1.2079441541679836", '{"x": 0}')), command=COMMANDS[0]
)
@example(files={**model_with(), "adapter_config.json": LONG_NAME}, command=COMMANDS[0])
@example(files=model_with(config_json='{"a":' * 5000), command=COMMANDS[-2])
@given(files=damaged(), command=st.sampled_from(COMMANDS))
def test_damaged_folders(files, command, monkeypatch):
    monkeypatch.setattr(check, "_run_worker", lambda request, python, timeout: {"error": "not asked"})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        files = files | {"rows.jsonl": b'{"text": "w30"}\n'}
        for name, content in files.items():
            (folder / name).write_bytes(content)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([word.format(folder) for word in command])
        assert code in (0, 1, 2)
        # `doctor` ends with 2 if it has found an error, which it prints.
        found = command[0] == "doctor" and out.getvalue() != ""
        if code == 2 and not found:
            assert err.getvalue().startswith(f"pose-plugin {command[0]}: ") and out.getvalue() == ""
            assert len(err.getvalue()) < 2000, err.getvalue()
        assert "POSE_TRACEBACK" not in err.getvalue(), err.getvalue()
        after = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        assert not [name for name in after if ".part" in name]
        if code == 2 and "--mend" not in command:
            assert after == files
        assert {name: after[name] for name in files} == files or command[0] in ("card", "check")


@pytest.mark.parametrize("name", ["README.md", "config.json", "pose.json"])
def test_nothing_in_a_file_is_executed(tmp_path, name):
    for file, values in FILES.items():
        (tmp_path / file).write_text(json.dumps(values))
    attack = f"!!python/object/apply:os.system ['touch {tmp_path}/executed']"
    (tmp_path / name).write_text(f"---\nlicense: {attack}\n---\n" if name == "README.md" else attack)
    for command in [each for each in COMMANDS if each[0] != "check"]:
        with contextlib.suppress(SystemExit):
            main([word.format(tmp_path) for word in command])
    assert not (tmp_path / "executed").exists()
