import random

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from pose_plugin.evaluation.measures.passkey import Passkey, passkey
from pose_plugin.evaluation.model import greedy
from pose_plugin.evaluation.prompts import PasskeyBuilder
from pose_plugin.evaluation.results import Result, Row
from pose_plugin.utils.errors import PoSEError
from tests.evaluation.rule_model import RuleModel, constant, right_answer, sometimes_wrong

QUIET = {"progress": False}


def test_lengths_are_numbers_or_texts_one_or_several(make_llama, tokenizer):
    model, options = make_llama(), {"trials": 1, **QUIET}
    found = passkey(model, tokenizer, [1024], **options)
    assert passkey(model, tokenizer, ["1k"], **options) == passkey(model, tokenizer, 1024, **options) == found
    with pytest.raises(PoSEError, match=r"lengths=\[200.5\]: 200.5 is not a number of tokens"):
        passkey(model, tokenizer, [200.5], **options)


def test_a_perfect_model_scores_one(any_tokenizer):
    model = RuleModel(right_answer(any_tokenizer), len(any_tokenizer))
    result = passkey(model, any_tokenizer, [256, 300], trials=6, **QUIET)
    assert {length: row.score for length, row in result.by_length().items()} == {256: 1.0, 300: 1.0}
    assert max(row.distance for row in result.rows) <= result.k_max() <= 300
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


@pytest.mark.parametrize(
    ("text", "found"),
    [("12345", 1), (" 12345.", 1), ("\n12345", 1), ("123456", 0), ("1234", 0), ("x 1 12345", 0), ("The", 0), ("", 0)],
)
def test_the_first_run_of_digits_counts(tokenizer, text, found):
    measure = Passkey(trials=1)
    measure.prepare(tokenizer, [256])
    (prompt,) = measure.prompts(256)
    assert measure.score(text.replace("12345", prompt.expected[0]), prompt) == found


def test_a_prompt_is_read_once_and_logits_stay_small(tokenizer):
    model = RuleModel(right_answer(tokenizer), len(tokenizer))
    passkey(model, tokenizer, [512], trials=6, batch_size=4, **QUIET)
    assert len(PasskeyBuilder(tokenizer).document(512, 0.5, "12345").answer) == 5
    assert model.forwards == [(4, 1)] * 5 + [(2, 1)] * 5


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

    def older(input_ids, use_cache=None, **cached):
        return forward(input_ids=input_ids, use_cache=use_cache, **cached)

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
    """Finds the key in the first half only. Eight trials are rounded up to three for each depth."""
    right = right_answer(tokenizer)

    def rule(ids):
        text = tokenizer.decode(ids)
        return right(ids) if text.index("The pass key is") < 0.55 * len(text) else 9

    result = passkey(RuleModel(rule, len(tokenizer)), tokenizer, [600], trials=8, depths=[0, 0.5, 1], **QUIET)
    cells = {depth: (row.score, row.n) for (_, depth), row in result.by_depth().items()}
    assert cells == {0.0: (1, 3), 0.5: (1, 3), 1.0: (0, 3)}
    assert result.by_length()[600].score == 6 / 9


def test_random_depths_are_put_together_in_fifths(tokenizer):
    measure = Passkey(trials=40)
    measure.prepare(tokenizer, [256])
    drawn = [document.depth for document in measure.documents(256)]
    found = [prompt.depth for prompt in measure.prompts(256)]
    assert found == [min([0.1, 0.3, 0.5, 0.7, 0.9], key=lambda middle: abs(middle - depth)) for depth in drawn]


def test_the_distance_is_that_of_the_key_sentence_to_the_end(any_tokenizer):
    builder = PasskeyBuilder(any_tokenizer)
    for depth in (0, 0.3, 1):
        document = builder.document(300, depth, "12345")
        line = builder.key_line("12345")
        assert document.input_ids[300 - document.distance :][: len(line)] == line


def k_max_of(tokenizer, lengths, seen):
    """Measure a reader of the last `seen` tokens with passkeys in prompts of these lengths."""
    measure = Passkey(filler="Grass. " * 20)
    measure.prepare(tokenizer, lengths)
    rows = []
    for prompt in (prompt for n in lengths for prompt in measure.prompts(n)):
        visible = tokenizer.decode(prompt.ids[-seen + prompt.budget :])
        read = f"The pass key is {prompt.expected[0]}. Remember" in visible
        rows.append(Row(prompt.length, float(read), distance=prompt.distance))
    return Result("passkey", "", tuple(rows)).k_max()


@pytest.mark.parametrize(
    ("seen", "expected"),
    {512: 512, 1024: 1024, 2048: 2048, 3000: 3072, 4096: 4096, 8192: 8192, 20000: 16384}.items(),
)
def test_a_model_that_sees_its_last_tokens_scores_as_many(tokenizer, seen, expected):
    """k_max depends on the distance of the key, not on the length of the prompt."""
    assert k_max_of(tokenizer, [512, 1024, 2048, 4096, 8192, 16384], seen) == expected


@pytest.mark.parametrize("lengths", [[32768], [8192, 32768], [2048, 32768]])
@pytest.mark.parametrize("seen", [2048, 4096, 8192])
def test_k_max_is_no_larger_than_what_is_seen_if_only_long_prompts_are_measured(tokenizer, lengths, seen):
    assert seen / 2 < k_max_of(tokenizer, lengths, seen) <= seen


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({657: 0, 833: 0, 1784: 0, 6067: 1}, 0),  # one far hit says nothing about the nearer distances
        ({657: 1, 833: 1, 1784: 0, 6067: 1}, 896),
        ({900: 1, 1800: 1, 2700: 1, 3600: 1, 4470: 1}, 5120),  # no key is farther back
        ({900: 1, 1800: 1, 2700: 1, 3600: 1, 8000: 1}, 8192),
    ],
)
def test_k_max_claims_no_distance_at_which_no_key_was_asked_for(found, expected):
    rows = [Row(8192, float(hit), distance=distance) for distance, hit in found.items()]
    assert Result("passkey", "", tuple(rows)).k_max() == expected


def result_of(found):
    """Ten keys in each hundred tokens of one prompt of 400, of which so many are found."""
    rows = [
        Row(400, float(i < right), distance=100 * hundred + 10 * i + 5)
        for hundred, right in enumerate(found)
        for i in range(10)
    ]
    return Result("passkey", "", tuple(rows))


@pytest.mark.parametrize(
    ("found_of_ten", "expected"),
    [((10, 10, 10, 10), 400), ((10, 1, 10, 10), 100), ((1, 10), 0), ((10, 2, 0), 200), ((2, 2, 2), 300), ((9,), 100)],
)
def test_k_max_ends_before_the_first_distance_with_fewer_than_a_fifth(found_of_ten, expected):
    assert result_of(found_of_ten).k_max() == expected
    assert Passkey.summary(result_of(found_of_ten)) == {"k_max": expected}


def test_uncertainty():
    tried = {128: (40, 50), 256: (50, 50)}
    scores = [Row(n, float(i < found)) for n, (found, count) in tried.items() for i in range(count)]
    rows = Result("passkey", "", tuple(scores)).by_length()
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


def test_lengths_are_measured_from_the_shortest_on_and_once(tokenizer):
    model = RuleModel(right_answer(tokenizer), len(tokenizer))
    result = passkey(model, tokenizer, [300, 256, 300], trials=1, **QUIET)
    assert result == passkey(model, tokenizer, [256, 300], trials=1, **QUIET)
    assert [row.length for row in result.rows] == [256, 300]
