"""lm-eval: lengths that are passed and checked, a local task of its own, no data from anywhere."""

import json

import pytest

from pose_plugin.errors import PoSEError
from pose_plugin.evaluation.harness import HarnessResult, harness, require_harness, scores_of
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


def case(folder, tokenizer, model, lengths, answer="7"):
    """A model that writes one token and then ends."""
    import torch

    token, end = tokenizer(answer, add_special_tokens=False)["input_ids"][-1], tokenizer.eos_token_id
    head, forward = torch.zeros(len(tokenizer)), model.forward

    def written(*args, **kwargs):
        out = forward(*args, **kwargs)
        ids = kwargs["input_ids"]
        for row in range(len(ids)):
            out.logits[row, -1] = head
            out.logits[row, -1, end if ids[row, -1] == token else token] = 9.0
        return out

    model.forward = written
    model.generation_config.eos_token_id = end
    return harness(model, tokenizer, "unused", ["local_key"], lengths, include_path=str(folder), batch_size=1)


def test_a_local_task_has_the_known_score(tasks, tokenizer, make_llama):
    result = forked(case, tasks, tokenizer, make_llama(), [64, 128]).value
    assert result.scores == {"local_key exact_match": 0.75}
    prompt = len(tokenizer("The pass key is 7. What is it?")["input_ids"])
    assert (result.longest, result.lengths) == (prompt + 4, (64, 128))
    assert "lengths passed 64, 128" in result.definition and "none was cut" in result.definition
    assert HarnessResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_prompt_that_would_be_cut_stops_the_run_before_the_model_runs(tasks, tokenizer, make_llama):
    (tasks / "local.yaml").write_text(TASK.format(rows=tasks / "rows.jsonl", answer=400))

    def refused():
        with pytest.raises(PoSEError, match=r"the longest of 4 lm-eval prompts has 4\d\d tokens with its answer"):
            case(tasks, tokenizer, make_llama(), [64])

    forked(refused)


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
    assert scores_of(results, [4096, 8192]) == {"niah_single_1 4096": 0.5, "longbench_x f1_score": 0.3}


@pytest.mark.parametrize(
    ("asked", "lengths", "message"),
    [
        (
            ["niah_single_1"],
            [2048, 8192],
            "lengths=2048 with niah_single_1: RULER in lm-eval cannot make prompts below 4096",
        ),
        (["ruler"], [512], "--tasks needle, which has no such limit"),
        (["infinitebench_kv"], [4096], "has no such task. lm-eval has no InfiniteBench tasks"),
        (["helmet"], [4096], "has no such task. HELMET has no tasks in lm-eval"),
        (["longbench_nope"], [4096], "Similar: longb"),
    ],
)
def test_bad_input(asked, lengths, message):
    if min(lengths) >= 4096:
        pytest.importorskip("lm_eval")
    with pytest.raises(PoSEError, match=message):
        require_harness(asked, lengths)


def test_without_lm_eval(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(PoSEError, match="--harness needs lm-eval: pip install lm-eval"):
        require_harness(["local_key"], [64])
