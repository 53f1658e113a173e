import random

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from pose_plugin.evaluation.measures.passkey import Passkey, _Reader, passkey, verdict
from pose_plugin.evaluation.model import greedy
from pose_plugin.evaluation.prompts import PasskeyBuilder, PasskeyTemplate
from pose_plugin.evaluation.results import Result, Row
from tests.evaluation.rule_model import RuleModel, constant, right_answer, sometimes_wrong

QUIET = {"progress": False}


def test_a_perfect_model_scores_one(any_tokenizer):
    model = RuleModel(right_answer(any_tokenizer), len(any_tokenizer))
    result = passkey(model, any_tokenizer, [256, 300], trials=6, **QUIET)
    assert {length: row.score for length, row in result.by_length().items()} == {256: 1.0, 300: 1.0}
    assert result.k_max() == 300
    assert result.metrics() == {"passkey/256": 1.0, "passkey/300": 1.0}


def test_a_blind_model_scores_zero(any_tokenizer):
    seven = any_tokenizer("7", add_special_tokens=False)["input_ids"][-1]
    model = RuleModel(constant(seven), len(any_tokenizer))
    result = passkey(model, any_tokenizer, [256], trials=20, **QUIET)
    assert (result.by_length()[256].score, result.by_length()[256].n) == (0, 20)
    assert result.k_max() == 0


@pytest.mark.parametrize("name", ["single digits", "joined digits", "with BOS"])
def test_scores_as_real_generation_does(tokenizers_by_name, name):
    """Right, wrong, stopped early, another way to the same digits: each prompt as `generate` says."""
    tokenizer = tokenizers_by_name[name]
    pieces = ["1", "7", " ", "\n", ".", " 12", " 345", tokenizer.eos_token]
    tokens = sorted({i for p in pieces for i in tokenizer(p, add_special_tokens=False)["input_ids"]})
    model = RuleModel(sometimes_wrong(right_answer(tokenizer), tokens, 0.2), len(tokenizer))
    result = passkey(model, tokenizer, [256], trials=60, **QUIET)
    measure = Passkey(trials=60)
    measure.prepare(tokenizer, [256])
    for row, document in zip(result.rows, measure.documents(256), strict=True):
        config = GenerationConfig(
            do_sample=False, use_cache=False, max_new_tokens=len(document.answer), pad_token_id=0,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        written = model.generate(torch.tensor([document.prompt]), generation_config=config)[0]
        text = tokenizer.decode(written[len(document.prompt) :], skip_special_tokens=True)
        assert row.score == (first_digits(text) == document.key)
        assert text.startswith(row.details["answer"])
    assert 0.2 < result.by_length()[256].score < 0.9


def first_digits(text: str) -> str:
    """Written without regular expressions, to share nothing with the scorer."""
    found = ""
    for character in text:
        if character in "0123456789":
            found += character
        elif found:
            break
    return found


SENTENCE = PasskeyTemplate(answer=" {key}.")
"""An answer with a token more than its digits, so that a wrong first token does not settle it."""


def test_an_answer_behind_another_token_is_found_token_by_token(tokenizer):
    right = right_answer(tokenizer)
    space, line_break = tokenizer.convert_tokens_to_ids(["Ġ", "Ċ"])

    def rule(ids):
        if ids[-1] == space:
            return line_break
        behind = len(ids) - ids[::-1].index(space)
        return right(ids[:behind] + ids[behind + 1 :])  # as if the line break were not there

    model = RuleModel(rule, len(tokenizer))
    result = passkey(model, tokenizer, [256], trials=3, template=SENTENCE, **QUIET)
    assert [row.score for row in result.rows] == [1.0] * 3
    assert [row.details["answer"] for row in result.rows] == ["\n" + row.details["expected"][0] for row in result.rows]


@pytest.mark.parametrize(
    ("text", "to_come", "expected"),
    [
        ("12345", 0, True),
        (" 12345", 0, True),
        ("\n12345.", 3, True),
        ("12345", 1, None),  # a sixth digit would make it wrong
        ("123456", 0, False),
        ("123456", 5, False),
        ("12", 3, None),
        ("12", 2, False),  # too few to come
        ("12.", 9, False),  # the run has ended
        ("13", 9, False),
        ("", 5, None),
        ("The", 4, False),
        ("The", 0, False),
        ("x 1 12345", 0, False),  # the first run counts
    ],
)
def test_verdict(text, to_come, expected):
    assert verdict(text, "12345", to_come) is expected


def test_one_forward_settles_wrong_digits_and_logits_stay_small(tokenizer):
    right = right_answer(tokenizer)
    seven, digits = (tokenizer.convert_tokens_to_ids(list(text)) for text in ("7", "0123456789"))
    model = RuleModel(lambda ids: seven[0] if right(ids) in digits else right(ids), len(tokenizer))
    passkey(model, tokenizer, [512], trials=10, batch_size=4, **QUIET)
    answer = len(PasskeyBuilder(tokenizer).document(512, 0.5, "12345").answer)
    assert answer == 5  # the space before the key is a token of its own and ends the prompt
    assert model.forwards == [(4, answer + 1), (4, answer + 1), (2, answer + 1)]


def test_what_one_forward_leaves_open_is_decoded_in_batches(tokenizer):
    """The answer is five digits and a full stop; after another first token five digits still fit."""
    model = RuleModel(constant(tokenizer.convert_tokens_to_ids(".")), len(tokenizer))
    passkey(model, tokenizer, [512], trials=4, batch_size=4, template=SENTENCE, **QUIET)
    assert model.forwards == [(4, 7)] + 6 * [(4, 1)]


def test_greedy_writes_what_generate_writes(make_llama):
    model = make_llama()
    ids = torch.randint(0, 400, (3, 40), generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(do_sample=False, max_new_tokens=7, pad_token_id=0)
    with torch.no_grad():
        assert greedy(model, ids, 7).equal(model.generate(ids, generation_config=config)[:, 40:])


def test_batches_and_models_without_logits_to_keep_score_the_same(any_tokenizer, make_llama, monkeypatch):
    model = make_llama(len(any_tokenizer))
    expected = passkey(model, any_tokenizer, [256], trials=5, batch_size=1, **QUIET)
    assert passkey(model, any_tokenizer, [256], trials=5, batch_size=3, **QUIET) == expected
    forward = model.forward

    def older(input_ids, past_key_values=None, use_cache=None):
        return forward(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)

    monkeypatch.setattr(model, "forward", older)
    assert passkey(model, any_tokenizer, [256], trials=5, **QUIET) == expected


def test_model_and_random_state_are_as_before(tokenizer, make_llama):
    model = make_llama(attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = passkey(model, tokenizer, [256], trials=4, **QUIET)
    assert [module.training for module in model.modules()] == modes
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert model.config.use_cache is True
    assert passkey(model, tokenizer, [256], trials=4, **QUIET) == first


def test_state_comes_back_after_an_error(tokenizer, make_llama, monkeypatch):
    model = make_llama().train()
    monkeypatch.setattr(model.model, "forward", lambda **kw: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        passkey(model, tokenizer, [256], trials=1, **QUIET)
    assert model.training and model.lm_head.training


def test_every_model_gets_the_same_prompts_and_the_seed_changes_them(tokenizer):
    models = [RuleModel(rule, len(tokenizer)) for rule in (right_answer(tokenizer), constant(9))]

    def asked_of(model, lengths, seed=0):
        rows = passkey(model, tokenizer, lengths, trials=5, seed=seed, **QUIET).rows
        return [(row.details["expected"], row.depth) for row in rows if row.length == 256]

    asked = [asked_of(model, [256]) for model in models]
    assert asked[0] == asked[1]
    assert asked_of(models[1], [256], seed=1) != asked[0]
    assert asked_of(models[1], [300, 256]) == asked[0]


def test_depths_share_the_trials_out(tokenizer):
    """Finds the key in the first half only."""
    right = right_answer(tokenizer)

    def rule(ids):
        text = tokenizer.decode(ids)
        return right(ids) if text.index("The pass key is") < 0.55 * len(text) else 9

    result = passkey(RuleModel(rule, len(tokenizer)), tokenizer, [600], trials=9, depths=[0, 0.5, 1], **QUIET)
    cells = {depth: (row.score, row.n) for (_, depth), row in result.by_depth().items()}
    assert cells == {0.0: (1, 3), 0.5: (1, 3), 1.0: (0, 3)}
    assert result.by_length()[600].score == 6 / 9


def test_random_depths_are_put_together_in_fifths(tokenizer):
    measure = Passkey(trials=40)
    measure.prepare(tokenizer, [256])
    drawn = [document.depth for document in measure.documents(256)]
    found = [prompt.depth for prompt in measure.prompts(256)]
    assert found == [min([0.1, 0.3, 0.5, 0.7, 0.9], key=lambda middle: abs(middle - depth)) for depth in drawn]


def result_of(scores):
    """{length: (found, tried)} as a result."""
    rows = [Row(n, float(i < found)) for n, (found, tried) in scores.items() for i in range(tried)]
    return Result("passkey", "", tuple(rows))


@pytest.mark.parametrize(
    ("correct_of_ten", "expected"),
    [((10, 10, 10), 512), ((10, 1, 10), 128), ((1, 10, 10), 0), ((10, 2, 0), 256), ((2, 2, 2), 512)],
)
def test_k_max(correct_of_ten, expected):
    scores = {length: (n, 10) for length, n in zip((128, 256, 512), correct_of_ten, strict=True)}
    assert result_of(scores).k_max() == expected
    assert Passkey.summary(result_of(scores)) == {"k_max": expected}


def test_uncertainty():
    rows = result_of({128: (40, 50), 256: (50, 50)}).by_length()
    assert rows[128].standard_error == pytest.approx(0.0566, abs=1e-4)
    assert rows[128].interval == pytest.approx((0.6696, 0.8876), abs=1e-4)
    assert rows[256].standard_error == 0
    assert rows[256].interval == pytest.approx((0.9287, 1.0), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, r"lengths=\[\]"),
        ({"lengths": [256], "trials": 0}, "trials"),
        ({"lengths": [256], "trials": 2, "depths": [0, 0.5, 1]}, "trials=2"),
        ({"lengths": [256], "depths": []}, "depths has 0"),
        ({"lengths": [256, 20]}, "length=20"),
    ],
)
def test_bad_input_is_refused_before_the_model_runs(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        passkey(None, tokenizer, **arguments, **QUIET)


def test_an_answer_that_has_ended_is_not_decoded_on(tokenizer):
    model = RuleModel(constant(tokenizer.eos_token_id), len(tokenizer))
    result = passkey(model, tokenizer, [512], trials=2, batch_size=2, **QUIET)
    assert len(model.forwards) == 1
    assert [(row.score, row.details["answer"]) for row in result.rows] == [(0.0, "")] * 2


def test_lengths_are_measured_from_the_shortest_on_and_once(tokenizer):
    model = RuleModel(right_answer(tokenizer), len(tokenizer))
    result = passkey(model, tokenizer, [300, 256, 300], trials=1, **QUIET)
    assert result == passkey(model, tokenizer, [256, 300], trials=1, **QUIET)
    assert [row.length for row in result.rows] == [256, 300]


def test_a_token_may_hold_several_of_the_digits_to_come(tokenizers_by_name):
    """The key split in another way than the answer is: two tokens more may bring its other four digits."""
    tokenizer = tokenizers_by_name["joined digits"]
    read = _Reader(tokenizer, RuleModel(constant(9), len(tokenizer)))
    (first,) = tokenizer(" 1", add_special_tokens=False)["input_ids"]
    assert read.most_digits >= 2
    assert [read([first], budget, "12345")[1] for budget in (1, 3)] == [False, None]
    # None come behind an end.
    assert read([tokenizer.eos_token_id], 3, "12345") == ("", False)
