"""lm-eval: lengths that are passed and checked, a local task of its own, no data from anywhere."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pose_plugin.evaluation.measures.harness import (
    _PromptCounter,
    answer_tokens,
    harness,
    require_harness,
    rows_of,
    stops,
    version,
)
from pose_plugin.evaluation.results import Result
from pose_plugin.utils.errors import PoSEError
from tests.forked import forked

TASK = """task: local_key
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{do_sample: false, max_gen_toks: {answer}, until: ["\\n"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def tasks(tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"q": "The pass key is 7. What is it?", "a": answer} for answer in "7773"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl", answer=4))
    return tmp_path


def case(folder, tokenizer, model, lengths, answer="7", task="local_key", second=None, **generation):
    """A model that writes one token and then ends; `second` is nearly as likely, `generation` its generation config."""
    import torch

    token, end = tokenizer(answer, add_special_tokens=False)["input_ids"][-1], tokenizer.eos_token_id
    head, forward = torch.zeros(len(tokenizer)), model.forward
    if second:
        head[tokenizer(second, add_special_tokens=False)["input_ids"][-1]] = 8.0

    def written(*args, **kwargs):
        out = forward(*args, **kwargs)
        ids = kwargs["input_ids"]
        for row in range(len(ids)):
            out.logits[row, -1] = head
            out.logits[row, -1, end if ids[row, -1] == token else token] = 9.0
        return out

    model.forward = written
    model.generation_config.eos_token_id = end
    given = model.generation_config
    given.update(**generation)
    found = harness(model, tokenizer, [task], lengths, harness_path=str(folder), batch_size=1)
    assert model.generation_config is given
    return found


def scores(result):
    return {f"{row.kind} {row.length or ''}".strip(): row.score for row in result.rows}


def test_a_local_task_has_the_known_score(tasks, tokenizer, make_llama):
    result = forked(case, tasks, tokenizer, make_llama(), [64, 128]).value
    assert scores(result) == {"local_key exact_match": 0.75}
    prompt = len(tokenizer("The pass key is 7. What is it?")["input_ids"])
    assert f"lengths passed 64, 128; the longest prompt had {prompt + 4} tokens" in result.definition
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_the_model_s_own_penalties_do_not_count(tasks, tokenizer, make_llama):
    """As in the other measures and of a server: a digit of the prompt is not less likely in the answer."""
    own = {"second": "3", "repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "num_beams": 2}
    result = forked(functools.partial(case, tasks, tokenizer, make_llama(), [64], **own)).value
    assert scores(result) == {"local_key exact_match": 0.75}


def test_a_prompt_that_would_be_cut_stops_the_run_before_the_model_runs(tasks, tokenizer, make_llama):
    (tasks / "local.yaml").write_text(TASK.format(rows=tasks / "rows.jsonl", answer=400))

    def refused():
        with pytest.raises(PoSEError, match=r"an lm-eval prompt has 4\d\d tokens"):
            case(tasks, tokenizer, make_llama(), [64])

    forked(refused)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 256),
        ({"max_gen_toks": 7, "max_tokens": 9}, 7),
        ({"max_new_tokens": 9, "max_gen_toks": None}, 9),
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": "9"}, 9),
    ],
)
def test_an_answer_has_the_tokens_that_lm_eval_gives_it(options, tokens):
    """Under each name that lm-eval reads: with fewer, a prompt that it cuts would pass."""
    request = SimpleNamespace(args=("abc", {"until": [], **options}))
    asked = SimpleNamespace(
        generate_until=lambda requests: "answers", loglikelihood=None, tok_encode=list, max_gen_toks=256
    )
    counter = _PromptCounter(asked, 3 + tokens)
    assert asked.generate_until([request]) == "answers" and counter.longest == 3 + tokens
    assert answer_tokens(options, 256) == tokens
    _PromptCounter(asked, 2 + tokens)
    with pytest.raises(PoSEError, match=f"has {3 + tokens} tokens with its answer"):
        asked.generate_until([request])


@pytest.mark.parametrize(
    ("until", "found"), [(None, ()), ("\n", ("\n",)), (["", "a", None], ("a",)), ("", ()), ([""], ())]
)
def test_an_empty_text_ends_no_answer(until, found):
    assert stops({"until": until}) == found == stops({"until": until, "max_gen_toks": 3})


BY_LENGTH = """task: own_by_length
dataset_path: ""
custom_dataset: !function rows.made
output_type: generate_until
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "7"
generation_kwargs: {do_sample: false, max_gen_toks: 2, until: []}
process_results: !function rows.scored
metric_list:
  - {metric: "64", aggregation: !function rows.mean, higher_is_better: true}
  - {metric: "128", aggregation: !function rows.mean, higher_is_better: true}
"""
ROWS = """import datasets

WORD = " is"


def made(max_seq_lengths, tokenizer, **rest):
    # For each length a row that is answered right and one that is not; with its answer it has just that many tokens.
    rows = [{"prompt": WORD * (n - 2), "length": n, "answer": a} for n in max_seq_lengths for a in "73"]
    return {"test": datasets.Dataset.from_list(rows)}


def scored(doc, results):
    other = {"64": -1.0, "128": -1.0}
    return {**other, str(doc["length"]): float(results[0].strip() == doc["answer"])}


def mean(scores):
    told = [score for score in scores if score >= 0]
    return sum(told) / len(told) if told else -1.0
"""


def test_the_tasks_of_a_user_get_the_lengths(tmp_path, tokenizer, make_llama):
    pytest.importorskip("lm_eval")
    (tmp_path / "own.yaml").write_text(BY_LENGTH)
    (tmp_path / "rows.py").write_text(ROWS)
    assert len(tokenizer(" is")["input_ids"]) == 1

    def measured():
        return [case(tmp_path, tokenizer, make_llama(), n, task="own_by_length") for n in ([64, 128], [128])]

    both, long = forked(measured).value
    assert scores(both) == {"own_by_length 64": 0.5, "own_by_length 128": 0.5}
    assert "had 128 tokens" in both.definition
    assert scores(long) == {"own_by_length 128": 0.5} and long.lengths == [128]

    def too_long():
        with pytest.raises(PoSEError, match=r"132 tokens .*\(68\)"):
            case(tmp_path, tokenizer, make_llama(), [32, 64], task="own_by_length")

    (tmp_path / "rows.py").write_text(ROWS.replace("(n - 2)", "130"))
    forked(too_long)


INFINITE = """include: {folder}/infinitebench_passkey.yaml
task: own_passkey
dataset_path: json
dataset_kwargs: {{data_files: {{passkey: {rows}}}}}
"""


def test_infinitebench_as_lm_eval_scores_it(tmp_path, tokenizer, make_llama):
    """Its own task and rule on rows of ours: the data would come from the network."""
    lm_eval = pytest.importorskip("lm_eval")
    folder = Path(lm_eval.__file__).parent / "tasks" / "infinitebench"
    if not folder.is_dir():
        pytest.skip(f"lm-eval {version()} has no InfiniteBench; 0.4.12 has")
    row = {"id": 0, "context": "The pass key is 7.", "input": "What is the pass key?", "options": []}
    rows = [{**row, "answer": [answer]} for answer in "7773"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(INFINITE.format(folder=folder, rows=tmp_path / "rows.jsonl"))
    result = forked(case, tmp_path, tokenizer, make_llama(), [128], "7", "own_passkey").value
    assert scores(result) == {"own_passkey score": 0.75}


def test_scores_by_length_and_what_ruler_has_not_measured():
    results = {
        "niah_single_1": {
            "alias": "x",
            "4096,none": 0.5,
            "8192,none": -1.0,
            "16384,none": 0.2,
            "4096_stderr,none": 0.1,
        },
        "longbench_x": {"f1_score,none": 0.3, "f1_score_stderr,none": "N/A", "sample_len": 5},
    }
    rows = rows_of(results, [4096, 8192])
    assert [(row.kind, row.length, row.score) for row in rows] == [
        ("niah_single_1", 4096, 0.5),
        ("longbench_x f1_score", 0, 0.3),
    ]


@pytest.mark.parametrize(
    ("asked", "lengths", "message"),
    [
        (["niah_single_1"], [2048, 8192], "lengths=2048"),
        (["ruler"], [512], "lengths=512"),
        (["ruler_vt"], [4096, 6000], "lengths=6000"),
        (["helmet"], [4096], "--harness helmet"),
        (["longbench_nope"], [4096], "Similar: longb"),
    ],
)
def test_what_lm_eval_would_search_forever_or_throw_away_or_does_not_have(asked, lengths, message):
    pytest.importorskip("lm_eval")
    with pytest.raises(PoSEError, match=message):
        require_harness(asked, lengths)


def test_without_lm_eval(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PoSEError, match="--harness local_key needs lm_eval"):
        require_harness(["local_key"], [64])
