"""A served model: the same prompts, answers and scores as in this process, and no prompt is asked twice."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("openai")

from pose_plugin.cli import main as cli
from pose_plugin.evaluation import served as served_module
from pose_plugin.evaluation.measures import by_task
from pose_plugin.evaluation.measures.passkey import Passkey, passkey
from pose_plugin.evaluation.served import ServedModel
from pose_plugin.rope import extend_context
from pose_plugin.utils.server import Server
from tests.doctor import real_servers
from tests.evaluation.model_server import ModelServer
from tests.evaluation.test_harness import TASK
from tests.forked import forked
from tests.kill import files, survives
from tests.models import edit

BASE = Path(__file__).parents[2] / "example_configs" / "quickstart" / "base"
TEXT = "".join(f"Line {i} tells of the sea and the wind.\n" for i in range(120))
KEY = "sk-secret-0123456789"
LLAMA_CPP = real_servers.llama_cpp()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture
def serve(model, tokenizer):
    return lambda **options: ModelServer(model, tokenizer, **options)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def run(*words):
    return cli.main(["evaluate", *map(str, words), "--no-figures", "--quiet"])


def models_of(folder):
    return json.loads((folder / "results.json").read_text())["models"]


# All measures that read nothing but answers, except passkey and ruler, which other lengths and tests have.
READ_ANSWERS = ["needle", "topics", "haystack", "association"]


def test_every_measure_without_logits_is_compared():
    on_a_server = {name for name, measure in by_task().items() if measure.on_a_server}
    assert on_a_server - {"passkey", "ruler"} == set(READ_ANSWERS)


def rows_of(model, *measures):
    return [(row["score"], row.get("details")) for name in measures for row in model[name]["rows"]]


def test_scores_and_answers_are_those_of_a_model_in_this_process(serve, text, tmp_path, capsys):
    scores = set()
    # The model finds keys in prompts of 180 tokens, and some in those of 256.
    for tasks, lengths, requests in ((["passkey"], "180,256", 10), (READ_ANSWERS, "600,1100", 67)):
        words = ["--tasks", ",".join(tasks), "--lengths", lengths, "--facts", 4] if len(tasks) > 1 else []
        words = words or ["--tasks", "passkey", "--lengths", lengths]
        with serve() as server:
            code = run(BASE, "--url", server.url, "--like", BASE, "--texts", text, "--trials", 5, *words,
                       "--output", tmp_path / tasks[0])  # fmt: skip
        assert code == 0 and server.most <= 4
        here, served = models_of(tmp_path / tasks[0])
        assert [here["name"], served["name"]] == ["base", "tiny (served)"]
        assert rows_of(here, *tasks) == rows_of(served, *tasks)
        scores |= {score for score, _ in rows_of(here, *tasks)}
        assert served["notes"] == [] and served["served_model"] == "tiny"
        # Prompts are exact ids, so those of one length have as many tokens, answers included.
        assert max(len(body["prompt"]) + body["max_tokens"] for body in server.prompts) == int(lengths.split(",")[1])
        assert f"together {requests} requests" in capsys.readouterr().out and len(server.prompts) == requests
    # Equal scores of a model that finds nothing would prove little.
    assert {0.0, 1.0} <= scores


@pytest.mark.parametrize("form", ["text", "chat"])
def test_a_server_that_takes_no_ids_gets_text_and_the_report_names_it(serve, tmp_path, form):
    with serve(takes=(form,)) as server:
        words = ["--url", server.url, "--like", BASE, "--lengths", 300, "--trials", 3, "--output", tmp_path]
        assert run(*words) == 0
        # The same command again asks nothing, and knows how the prompts were sent.
        assert run(*words) == 0
    (served,) = models_of(tmp_path)
    assert any(f"sent as {form}" in note for note in served["notes"])
    body = server.prompts[0]
    prompt = body["prompt"] if form == "text" else body["messages"][0]["content"]
    assert prompt.startswith("There is an important info") and len(server.prompts) == 3


def test_a_server_that_dies_is_resumed_and_no_prompt_is_asked_twice(serve, text, tmp_path, capsys):
    words = ["--like", BASE, "--tasks", "passkey,haystack", "--texts", text, "--lengths", "300,600", "--trials", 6,
             "--facts", 3, "--retries", 1, "--output", tmp_path / "out"]  # fmt: skip
    with serve(dies_after=8) as server:
        assert run("--url", server.url, *words) == 2
        assert "does not answer" in capsys.readouterr().err
        assert run("--url", server.url, *words, "--plan") == 0
        assert "together 8 requests" in capsys.readouterr().out
        server.dies_after = None
        assert run("--url", server.url, *words) == 0
        prompts = [tuple(body["prompt"]) for body in server.prompts]
        assert len(prompts) == len(set(prompts)) == 16
        # More trials ask for the new ones only.
        assert run("--url", server.url, *words, "--trials", 8) == 0
        assert len(server.prompts) == 20
        asked = len(server.asked)
        assert run("--url", server.url, *words) == 0 and len(server.asked) == asked
    whole = models_of(tmp_path / "out")
    with serve() as server:
        assert run("--url", server.url, *words[:-1], tmp_path / "whole") == 0
    assert [rows_of(model, "passkey", "haystack") for model in whole] == [
        rows_of(model, "passkey", "haystack") for model in models_of(tmp_path / "whole")
    ]


class ByRule(ModelServer):
    """Answers from the prompt, without its model: the children of a test are forked while this server runs."""

    def generate(self, ids, body):
        return re.findall(r"\d{5}|$", self.tokenizer.decode(ids))[0], [0.0] * 5


def test_killed_at_any_moment(model, tokenizer, text, tmp_path):
    """Each answer that reached the disk was requested once; the results are those of a run that nobody killed."""
    with ByRule(model, tokenizer) as server:

        def command(folder):
            return run("--url", server.url, "--like", BASE, "--tasks", "passkey,haystack", "--texts", text, "--lengths",
                       "300,600", "--trials", 6, "--facts", 3, "--output", folder)  # fmt: skip

        def result(folder):
            found = files(folder)
            lines = found.pop("finished.jsonl").splitlines()
            rows = [json.loads(line) for line in lines if line.endswith(b"}")]
            keys = [row["key"] for row in rows]
            assert len(set(keys)) == len(keys)
            return found, sorted(keys)

        assert command(tmp_path / "first") == 0  # what it imports, the children have then already
        survives(command, tmp_path / "runs", result)


def test_new_weights_behind_the_same_address_are_asked(model, tokenizer, tmp_path, capsys):
    """As far as a server shows them; a mere restart asks nothing, and the command says that it uses kept answers."""
    weights = tmp_path / "weights" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"old")
    stated = {"root": str(weights.parent), "parent": None, "created": 1, "meta": {"n_ctx": 1000, "size": 10}}
    with ByRule(model, tokenizer) as server:
        server.facts = lambda: stated

        def asked(*more, **changes):
            stated.update(changes)
            before = len(server.prompts)
            assert run("--url", server.url, "--like", BASE, "--lengths", 300, "--trials", 2, "--output",
                       tmp_path / "out", *more) == 0  # fmt: skip
            return len(server.prompts) - before

        assert asked() == 2 and "kept from before" not in capsys.readouterr().out
        assert asked(created=2, meta={"n_ctx": 500, "size": 10}) == 0
        assert f"2 answers of {server.url} kept from before" in capsys.readouterr().out
        assert asked(meta={"n_ctx": 500, "size": 11}) == 2
        weights.write_bytes(b"newer")
        assert asked() == 2
        assert asked(root="elsewhere") == asked(parent="base") == asked("--fresh") == 2 and asked() == 0
        # What no server should state is no error.
        assert asked(root="x" * 5000, meta=[1]) == asked(root=["a"], meta=None) == 2


def test_the_model_s_own_repetition_penalty_is_switched_off(serve, tmp_path):
    """vLLM and SGLang would apply it to the digits of the prompt; here, nothing does."""
    like = shutil.copytree(BASE, tmp_path / "like")
    words = ["--lengths", 300, "--trials", 2, "--output", tmp_path / "out"]

    def sent(folder, *more, **options):
        with serve(**options) as server:
            assert run("--url", server.url, "--like", folder, *words, "--fresh", *more) == 0
            assert len(server.prompts) == 2
            (served,) = models_of(tmp_path / "out")
            return {body.get("repetition_penalty") for body in server.prompts}, served["notes"]

    assert sent(like) == ({None}, [])
    edit(like / "generation_config.json", lambda values: values.update(repetition_penalty=1.1))
    assert sent(like) == ({1.0}, []) and sent(like, takes=("chat",))[0] == {1.0}
    taken, notes = sent(like, refuses="repetition_penalty")
    assert taken == {None} and "generation_config.json (1.1)" in notes[0]
    # A form that is refused for another reason does not count as one without the field.
    assert sent(like, takes=("ids",)) == ({1.0}, [])


@pytest.mark.parametrize(
    ("thoughts", "answers"),
    [
        (lambda text: {"content": None, "reasoning_content": "Let me see."}, None),
        (lambda text: {"content": "", "reasoning": "Let me see."}, None),
        (lambda text: {"content": "<think>\nLet me see."}, None),
        (lambda text: {"content": f"<think>1 or 2?</think>{text}"}, "text"),
        (lambda text: {"reasoning_content": "1 or 2?"}, "text"),
    ],
)
def test_a_reasoning_model_that_only_thinks_gets_no_score(serve, tmp_path, capsys, thoughts, answers):
    with serve(takes=("chat",), thoughts=thoughts) as server:
        code = run("--url", server.url, "--like", BASE, "--lengths", 300, "--trials", 1, "--output", tmp_path)
    (served,) = models_of(tmp_path)
    if answers is None:
        assert code == 1 and "passkey" not in served and "on the model's thoughts" in served["notes"][0]
    else:
        answer = served["passkey"]["rows"][0]["details"]["answer"]
        assert code == 0 and answer and "1 or 2?" not in answer


def test_a_lost_server_leaves_the_other_models(serve, tmp_path, capsys):
    with serve(dies_after=2) as server:
        code = run(BASE, "--url", server.url, "--like", BASE, "--lengths", "300,400", "--trials", 3, "--retries", 1,
                   "--output", tmp_path)  # fmt: skip
    here, served = models_of(tmp_path)
    assert code == 1 and len(here["passkey"]["rows"]) == 6
    assert "does not answer" in served["notes"][0] and "passkey" not in served


@pytest.mark.parametrize("stated", [True, False])
def test_a_length_beyond_the_context_is_left_out_as_one_that_does_not_fit_in_memory(serve, tmp_path, stated, capsys):
    words = ["--like", BASE, "--trials", 2, "--tasks", "passkey", "--output", tmp_path]
    with serve(window=500, stated=stated) as server:
        assert run("--url", server.url, "--lengths", "300,800,900", *words) == 1
    (served,) = models_of(tmp_path)
    assert list(served["passkey"]["scores"]) == ["passkey/300"]
    assert "passkey at 800 was left out" in served["notes"][0] and "500 tokens" in served["notes"][0]
    assert len(server.prompts) == 2


def test_a_server_that_cuts_prompts_gives_no_score(serve, tmp_path, capsys):
    with serve(cut=400) as server:
        assert run("--url", server.url, "--like", BASE, "--lengths", 600, "--output", tmp_path) == 1
    assert "read 400 tokens of a prompt of" in capsys.readouterr().out


def test_the_cost_comes_first_and_has_a_limit(serve, tmp_path, capsys):
    words = ["--like", BASE, "--lengths", "300,600", "--trials", 5, "--output", tmp_path]
    with serve() as server:
        assert run("--url", server.url, *words, "--plan") == 0
        out = capsys.readouterr().out
        assert "600 tokens ×     5 requests" in out and "together 10 requests, 4,450 tokens of prompts" in out
        assert run("--url", server.url, *words, "--max-requests", 9) == 2
        assert "--max-requests 9 is less than what is missing: 10 requests" in capsys.readouterr().err
        assert server.asked == []
        # The sentence that shows what the server takes is none of them.
        assert run("--url", server.url, *words, "--max-requests", 10) == 0 and len(server.prompts) == 10


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--url", "URL", "--lengths", 300], "--like"),
        (["--like", BASE, "--lengths", 300], f"--like {BASE} has no effect without --url"),
        (
            ["--retries", 2, "--served-model", "x", "--key-variable", "K", "--lengths", 300],
            "--served-model x, --key-variable, --retries 2 have no effect without --url",
        ),
        (["--lengths", 300], "MODEL is missing"),
        (["--url", "URL", "--like", BASE, "--lengths", 300, "--served-model", "big"], "--served-model big"),
        (["--url", "URL", "--like", BASE, "--lengths", 300, "--key-variable", "NO_SUCH_KEY"], "--key-variable"),
        (["--url", "URL", "--like", BASE, "--lengths", 300, "--tasks", "gap", "--texts", "TEXT"], "--tasks=gap"),
        (["--url", "URL/no", "--like", BASE, "--lengths", 300, "--prompts", "words"], "words"),
        (
            ["--url", "URL", "--like", BASE, "--lengths", 300, "--extend", "target_length=1k"],
            "--extend target_length=1k stretches the first MODEL, and there is none",
        ),
    ],
)
def test_input_that_cannot_work_is_one_sentence(serve, text, tmp_path, capsys, words, named):
    with serve() as server:
        words = [str(word).replace("URL", server.url).replace("TEXT", str(text)) for word in words]
        assert run(*words, "--output", tmp_path / "out") == 2
    assert named in capsys.readouterr().err and server.asked == []


def test_a_key_is_sent_and_never_shown(serve, tmp_path, capsys, monkeypatch):
    words = ["--like", BASE, "--lengths", 300, "--trials", 2, "--output", tmp_path, "--key-variable", "MY_KEY"]
    with serve(key=KEY) as server:
        monkeypatch.setenv("MY_KEY", KEY + "-old")
        assert run("--url", server.url, *words) == 2
        shown = capsys.readouterr()
        assert "401" in shown.err and "--key-variable" in shown.err and KEY not in shown.err + shown.out
        monkeypatch.setenv("MY_KEY", KEY)
        assert run("--url", server.url, *words) == 0
    with serve() as server:
        assert run("--url", server.url.replace("//", "//me:pass-word-1@"), *words) == 0
        assert len(server.prompts) == 2
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in files and b"pass-word-1" not in files
    assert KEY not in "".join(capsys.readouterr())


def test_another_tokenizer_is_an_error(serve, tmp_path, capsys, tokenizers_by_name):
    shutil.copytree(BASE, tmp_path / "other")
    tokenizers_by_name["joined digits"].save_pretrained(tmp_path / "other")
    with serve() as server:
        code = run("--url", server.url, "--like", tmp_path / "other", "--lengths", 600, "--output", tmp_path / "out")
    assert code == 1 and "its tokenizer makes" in capsys.readouterr().out and server.prompts == []


def test_measures_that_need_logits_are_left_to_the_models_in_this_process(serve, text, tmp_path):
    words = ["--lengths", 300, "--trials", 2, "--texts", text, "--max-windows", 1, "--output", tmp_path]
    with serve() as server:
        assert run(BASE, "--url", server.url, "--like", BASE, *words) == 0
    here, served = models_of(tmp_path)
    assert "perplexity" in here and "perplexity" not in served
    assert "perplexity cannot be measured" in served["notes"][0]


def lm_eval_task(tokenizer, folder, length, rows):
    """Write a task of passkeys into the folder; return the options for it."""
    measure = Passkey(trials=rows)
    measure.prepare(tokenizer, [length])
    lines = [
        {"q": tokenizer.decode(row.prompt, skip_special_tokens=True), "a": row.key} for row in measure.documents(length)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "local.yaml").write_text(TASK.format(rows=folder / "rows.jsonl", answer=5))
    passkeys = ["--tasks", "passkey", "--trials", 1, "--lengths", 400]
    return [*passkeys, "--harness", "local_key", "--harness-path", folder]


def test_tasks_of_lm_eval_have_the_same_scores(serve, tokenizer, tmp_path):
    pytest.importorskip("lm_eval")
    words = lm_eval_task(tokenizer, tmp_path, length=256, rows=4)
    with serve() as server:
        words += ["--url", server.url, "--like", BASE, "--output", tmp_path / "out"]
        assert forked(run, BASE, *words).value == 0
        here, served = models_of(tmp_path / "out")
        assert here["harness"] == served["harness"] and 0 < here["harness"]["rows"][0]["score"] < 1
        assert sum(body.get("stop") == ["\n"] for body in server.asked) == 4


def test_as_a_function(serve, model, tokenizer):
    with serve() as server:
        served = ServedModel(Server(server.url), tokenizer, concurrency=1)
        found = passkey(served, tokenizer, [300], trials=3, progress=False)
    assert found == passkey(model, tokenizer, [300], trials=3, progress=False)


def test_requests_keep_the_pace(serve, tokenizer, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(served_module, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
    with serve() as server:
        served = ServedModel(Server(server.url), tokenizer, concurrency=1, requests_per_minute=30)
        passkey(served, tokenizer, [300], trials=3, progress=False)
        sent = len(server.asked)
    # The first of them goes at once.
    assert waits == pytest.approx([0.0] + [2.0] * (sent - 1)) and sent > 3


# --- real servers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extended(tmp_path_factory, tokenizer):
    """The base with a window of 4,096 tokens, as llama.cpp refuses prompts beyond the window."""
    folder = tmp_path_factory.mktemp("served") / "extended"
    config = extend_context(AutoConfig.from_pretrained(BASE), 4096, rope="yarn")
    AutoModelForCausalLM.from_pretrained(BASE, config=config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama.cpp", "transformers serve"])
def real_server(request, extended, tmp_path_factory):
    """What the command needs to know of a real server of the extended base."""
    if request.param == "llama.cpp":
        if LLAMA_CPP is None:
            pytest.skip("llama.cpp is not installed")
        program, converter = LLAMA_CPP
        file = real_servers.to_gguf(converter, extended, tmp_path_factory.mktemp("gguf") / "base.gguf")
        # By default llama.cpp keeps keys and values in float16, which changes long answers.
        exact = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
        with real_servers.llama_server(program, file, "-c", "2048", *exact) as url:
            yield ["--url", url]
    else:
        if not real_servers.has_transformers_serve():
            pytest.skip("transformers serve is not installed")
        with real_servers.transformers_server(extended) as url:
            yield ["--url", url, "--served-model", extended]


@pytest.mark.parametrize(
    "words",
    [
        ["--tasks", "passkey", "--lengths", 128, "--trials", 12],
        ["--tasks", "needle,topics", "--lengths", 1100, "--trials", 1],
        ["--tasks", "haystack", "--lengths", 600, "--facts", 3],
        ["--tasks", "ruler", "--ruler-tasks", "vt,niah_multikey_2", "--lengths", 1100, "--trials", 1],
    ],
    ids=lambda words: words[1],
)
def test_a_real_server_gives_the_answers_of_this_process(real_server, extended, text, tmp_path, words):
    given = ["--texts", text] if "haystack" in words else []
    assert run(extended, *real_server, "--like", extended, *words, *given, "--output", tmp_path / "out") == 0
    here, served = models_of(tmp_path / "out")
    measures = words[1].split(",")
    assert rows_of(here, *measures) == rows_of(served, *measures)
    if measures == ["passkey"]:
        assert {score for score, _ in rows_of(here, "passkey")} == {0.0, 1.0}


def test_a_real_server_gives_the_scores_of_lm_eval(real_server, extended, tokenizer, tmp_path):
    pytest.importorskip("lm_eval")
    words = lm_eval_task(tokenizer, tmp_path, length=128, rows=12)
    words += [*real_server, "--like", extended, "--output", tmp_path / "out"]
    assert forked(run, extended, *words).value == 0
    here, served = models_of(tmp_path / "out")
    assert here["harness"] == served["harness"] and 0 < here["harness"]["rows"][0]["score"] < 1
