"""Random command lines end with exit code 0, 1 or 2, a sentence if it is not 0, no traceback and no secret."""

from __future__ import annotations

import contextlib
import io
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pose_plugin.cli.main import COMMANDS, add_arguments, main
from pose_plugin.cli.parser import Parser
from tests.fuzz.settings import fuzz

KEY = "gsk_SECRET0123456789"
NUMBERS = ["1", "3", "32", "128", "512", "2k", "0", "-1", "1e9", "9" * 30, "9" * 5000, "1.5", "nan", "inf", "٣", "0x10"]
TEXTS = [
    "",
    " ",
    "x",
    "pose",
    "yarn",
    "base:2e8",
    "base:x",
    "pose:3,none",
    "pose:999999999",
    "multi=2,single",
    "schema",
]
ODD = ["\x1b[31m", "\udcff", "a\nb", "%s", "{}", "--", "-x", "a=b", "=", "target_length=2k,rope=linear", "1,2k,x"]
PATHS = ["empty", "file.txt", "config.yaml", "base", "nowhere", "file.txt/below", "c.png", "c.gif", "docs", "tokenizer"]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, *ODD, *PATHS]) | st.text(max_size=8)
# What keeps a line that happens to be valid cheap: the last value of an option counts.
CHEAP = {
    "coverage": ["--draws", "3"],
    "plan": ["--draws", "3"],
    "synthesize": ["--plan", "--quiet"],
    "evaluate": ["--plan", "--quiet"],
}


def actions(name):
    parser = Parser()
    add_arguments(name, parser)
    return [action for action in parser._actions if action.dest != "help"]


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from(sorted(COMMANDS)))
    known = actions(name)
    options = [action for action in known if action.option_strings]
    words = draw(st.lists(st.sampled_from(PATHS), max_size=2))
    # Half of the lines have what the command needs.
    needed = [action for action in options if action.required] if draw(st.booleans()) else []
    for action in needed + draw(st.lists(st.sampled_from(options), max_size=5)):
        option = action.option_strings[0]
        words.append(option if draw(st.integers(0, 9)) else option[:-1] + "q")
        if action.nargs != 0:
            words += [draw(VALUES)]
    words += draw(st.sampled_from([[], [], ["--api-key", KEY], [f"--token={KEY}"]]))
    if name == "synthesize":
        words += draw(
            st.sampled_from(
                [[], ["--key-variable", KEY], ["--base-url", f"http://me:{KEY}@h/v1"], ["--base-url", KEY[:3]]]
            )
        )
    if name in ("evaluate", "doctor"):
        # Nobody listens at port 9.
        words += draw(
            st.sampled_from([[], ["--key-variable", KEY], ["--url", f"http://me:{KEY}@127.0.0.1:9/v1"], ["--url", "h"]])
        )
    return [name, *words, *CHEAP.get(name, [])]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from tests.models import make_tokenizer

    folder = tmp_path_factory.mktemp("lines")
    (folder / "empty").mkdir()
    (folder / "docs").mkdir()
    (folder / "docs" / "a.txt").write_text("w1 w2 w3 " * 100)
    (folder / "file.txt").write_text("w1 w2 w3 " * 50)
    (folder / "config.yaml").write_text("base_model: base\nsequence_len: 32\npose: {target_length: 128}\n")
    (folder / "base").mkdir()
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


@fuzz(cost=2)
@example(line=["doctor", "--url", "http://h/v1\x1f"])
@example(line=["plan", f"--token={KEY}"])
@given(line=command_lines())
def test_any_line(place, line):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.delenv("OPENAI_BASE_URL", raising=False)
        # The openai client waits before it repeats a request.
        patch.setattr(time, "sleep", lambda seconds: None)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(line)
            except SystemExit as ended:  # help, version
                code = ended.code
    assert code in (0, 1, 2)
    shown = out.getvalue() + err.getvalue()
    assert "Traceback" not in shown and "SECRET" not in shown and "\x1b" not in err.getvalue()
    # Nothing that a user writes is a fault of a library.
    assert "POSE_TRACEBACK" not in err.getvalue(), err.getvalue()
    # `doctor` also ends with 2 if it has found an error in a folder, which it then prints.
    if code == 2 and not (line[0] == "doctor" and "error" in out.getvalue()):
        assert err.getvalue().count(f"pose-plugin {line[0]}: ") == 1


@fuzz
@given(st.lists(st.text(max_size=10), max_size=4))
def test_any_words(words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main([word for word in words if word not in COMMANDS])
        except SystemExit as ended:
            code = ended.code
    assert code in (0, 2) and (code == 0 or err.getvalue().startswith("pose-plugin: "))
