"""Needles and topics: prompts of the exact length, and scorers with known answers."""

import json
import random
import re
from collections import Counter

import pytest

from pose_plugin.evaluation.measures.association import Association
from pose_plugin.evaluation.measures.needle import DEPTHS, Needle, needle
from pose_plugin.evaluation.measures.ruler import Ruler
from pose_plugin.evaluation.measures.topics import TOPICS, Topics, topics
from pose_plugin.evaluation.results import Result, Row, joined
from pose_plugin.evaluation.retrieval import Prompt
from pose_plugin.utils.errors import PoSEError
from tests.evaluation.rule_model import RuleModel, constant

QUIET = {"progress": False}


def right_needle(text: str) -> str:
    """Reads the answer out of the prompt's text, with nothing of the builder's."""
    if "Key " in text:
        key = re.findall(r"value of key (\d+)\?", text)[-1]
        return re.search(rf"Key {key} has value (\d+)\.", text).group(1)
    return ", ".join(re.findall(r"secret number of \w+ is (\d+)\.", text))


def any_pair(text: str) -> str:
    """Some value of the list, the same for the same prompt."""
    return random.Random(text).choice(re.findall(r"has value (\d+)\.", text))


def first_topic(text: str) -> str:
    return re.search(r"talk about (.+?)\.", text).group(1)


def any_topic(text: str) -> str:
    return random.Random(text).choice(re.findall(r"Let us talk about (.+?)\.", text))


def answering(tokenizer, answer):
    made: dict[int, tuple] = {}

    def rule(ids: list[int]) -> int:
        # The prompts of a measure differ, and each is asked whole once, then token by token.
        known = next((n for n in made if tuple(ids[:n]) == made[n][0]), None)
        if known is None:
            text = answer(tokenizer.decode(ids))
            written = tokenizer(" " + text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * 60
            made.clear()
            made[len(ids)] = (tuple(ids), written)
            known = len(ids)
        return made[known][1][len(ids) - known]

    return rule


def prompts_of(kind, tokenizer, lengths, **options):
    """All prompts of a measure, by kind and length."""
    measure = kind(**options)
    measure.prepare(tokenizer, lengths)
    found = [prompt for length in lengths for prompt in measure.prompts(length)]
    return sorted(found, key=lambda prompt: list(measure.rules).index(prompt.kind))


def model_of(tokenizer, answer):
    return RuleModel(answering(tokenizer, answer), len(tokenizer))


@pytest.mark.parametrize("filler", [None, "The quick brown fox jumps over the lazy dog. " * 40])
def test_prompts_have_the_exact_length_and_hide_what_is_asked(any_tokenizer, filler):
    prompts = prompts_of(Needle, any_tokenizer, [400, 515], trials=5, filler=filler)
    assert len(prompts) == 3 * 2 * 5
    assert {len(p.ids) + p.budget for p in prompts if p.length == 515} == {515}
    for prompt in prompts:
        text = any_tokenizer.decode(prompt.ids, skip_special_tokens=True)
        assert set(re.findall(r"\d+", right_needle(text))) == set(prompt.expected)
        if prompt.kind == "single":
            at = text.index(prompt.expected[0]) / len(text)
            assert abs(at - prompt.depth) < 0.35
    assert [p.depth for p in prompts[:5]] == list(DEPTHS)
    again = prompts_of(Needle, any_tokenizer, [515], trials=5, filler=filler)
    assert [p.ids for p in prompts if p.length == 515] == [p.ids for p in again]
    other = prompts_of(Needle, any_tokenizer, [515], trials=5, seed=1, filler=filler)
    assert [p.expected for p in other] != [p.expected for p in again]


@pytest.mark.parametrize(
    ("kind", "option", "names"), [(Needle, "kinds", ["kv", "single"]), (Ruler, "ruler_tasks", ["vt", "fwe"])]
)
def test_what_is_named_twice_is_asked_once(tokenizer, kind, option, names):
    once, twice = (kind(trials=5, **{option: given}) for given in (names, [*names, names[0]]))
    for measure in (once, twice):
        measure.prepare(tokenizer, [700])
    assert twice.prompts(700) == once.prompts(700) and twice._definition() == once._definition()
    assert twice.depends() == once.depends()


def test_a_perfect_and_a_blind_model_on_needles(any_tokenizer):
    perfect = needle(model_of(any_tokenizer, right_needle), any_tokenizer, [420], trials=5, batch_size=1, **QUIET)
    assert perfect.metrics() == {f"needle/{kind}/420": 1.0 for kind in Needle.rules}
    assert {cell: row.score for cell, row in perfect.by_depth("kv").items()} == {(420, d): 1.0 for d in DEPTHS}
    seven = any_tokenizer("7", add_special_tokens=False)["input_ids"][-1]
    blind = needle(RuleModel(constant(seven), len(any_tokenizer)), any_tokenizer, [420], trials=5, **QUIET)
    assert set(blind.metrics().values()) == {0.0}


def test_a_guesser_among_pairs_gets_the_chance_that_is_stated(tokenizer):
    result = needle(model_of(tokenizer, any_pair), tokenizer, [300], kinds=["kv"], trials=120, batch_size=1, **QUIET)
    pairs = int(result.rows[0].note.split("/")[1])
    assert pairs == result.examples["kv"].count(" has value ")
    chance = 1 / pairs
    assert 5 < pairs < 30
    assert abs(result.by_length()[300].score - chance) < 4 * (chance * (1 - chance) / 120) ** 0.5


def test_what_is_written_behind_the_end_is_no_answer(tokenizer):
    def late(text: str) -> str:
        return f"none{tokenizer.eos_token} {right_needle(text)}"

    result = needle(model_of(tokenizer, late), tokenizer, [400], kinds=["single"], trials=5, batch_size=1, **QUIET)
    assert {(row.score, row.details["answer"]) for row in result.rows} == {(0.0, " none")}


def test_half_of_the_numbers_is_half_a_score(tokenizer):
    def half(text):
        return ", ".join(right_needle(text).split(", ")[:2])

    result = needle(model_of(tokenizer, half), tokenizer, [420], kinds=["multi"], trials=5, batch_size=1, **QUIET)
    assert result.metrics() == {"needle/multi/420": 0.5}


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        (" 1234567.", ("1234567",), 1.0),
        (" 7 1234567", ("1234567",), 0.0),
        (" 12345678", ("1234567",), 0.0),
        ("", ("1",), 0.0),
        ("1, 2, 3 and 4", ("1", "2", "3", "4"), 1.0),
        ("4 4 4 4", ("1", "2", "3", "4"), 0.25),
        ("9 8 7 6 1 2 3 4", ("1", "2", "3", "4"), 0.0),
    ],
)
def test_answering_by_hand(answer, expected, value):
    assert Needle().score(answer, Prompt("single", [], 1, 1, 0.0, expected)) == value


def test_topics_of_a_perfect_a_guessing_and_a_blind_model(tokenizer):
    perfect = topics(model_of(tokenizer, first_topic), tokenizer, [1100], trials=3, batch_size=1, **QUIET)
    assert perfect.metrics() == {"topics/first/1100": 1.0}
    guess = topics(model_of(tokenizer, any_topic), tokenizer, [1100], trials=80, batch_size=1, **QUIET)
    assert guess.rows[0].note == "chance 1/5" and abs(guess.by_length()[1100].score - 0.2) < 4 * (0.16 / 80) ** 0.5
    blind = topics(RuleModel(constant(9), len(tokenizer)), tokenizer, [1100], trials=2, **QUIET)
    assert blind.metrics() == {"topics/first/1100": 0.0}


def test_topic_prompts(any_tokenizer):
    for prompt in prompts_of(Topics, any_tokenizer, [1200, 3000], trials=2):
        text = any_tokenizer.decode(prompt.ids, skip_special_tokens=True)
        named = re.findall(r"Let us talk about (.+?)\.", text)
        assert len(prompt.ids) + prompt.budget == prompt.length and named[0] == prompt.expected[0]
        assert len(named) == len(set(named)) == (5 if prompt.length == 1200 else 7)


@pytest.mark.parametrize(("length", "count"), [(400, 5), (1999, 5), (2400, 6), (28_000, 70), (10**6, 70)])
def test_topics_by_length(length, count):
    assert Topics().topics_of(length) == count


def test_no_topic_stands_in_another():
    assert not [(a, b) for a in TOPICS for b in TOPICS if a != b and a.lower() in b.lower()]
    assert len(TOPICS) >= 70


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (" Honey  Bees.", 1.0),
        ("ROMAN ROADS, then honey bees", 0.0),
        (" not jazz pianists but honey bees", 0.0),
        (" bees", 0.0),
        ("", 0.0),
    ],
)
def test_topic_rule_by_hand(answer, value):
    assert Topics().score(answer, Prompt("first", [], 1, 1, None, ("honey bees",))) == value


def test_results_survive_json_and_are_joined(tokenizer):
    model = model_of(tokenizer, right_needle)
    parts = [needle(model, tokenizer, [n], trials=5, batch_size=1, **QUIET) for n in (400, 420)]
    back = [Result.from_dict(json.loads(json.dumps(part.to_dict()))) for part in parts]
    assert back == parts
    both = needle(model, tokenizer, [400, 420], trials=5, batch_size=1, **QUIET)
    assert joined(back) == both and both.lengths == [400, 420] and both.kinds == ["single", "multi", "kv"]
    assert "kv 400: chance 1/" in both.described and "kv 420: chance 1/" in both.described


@pytest.mark.parametrize(
    ("measure", "arguments", "message"),
    [
        (needle, {"lengths": [400], "trials": 1, "depths": [0.1, 0.2]}, "trials=1"),
        (needle, {"lengths": [400], "depths": [2.0]}, r"depths=2.0 is outside"),
        (needle, {"lengths": [400], "depths": [-0.1]}, r"depths=-0.1 is outside"),
        (needle, {"lengths": [400], "kinds": ["all"]}, "all"),
        (needle, {"lengths": [40]}, "length=40"),
        (needle, {"lengths": [40], "kinds": ["kv"]}, "length=40"),
        (topics, {"lengths": [100]}, "length=100"),
        (topics, {"lengths": [1000], "count": 1}, "count=1"),
        (topics, {"lengths": [90_000], "count": 99}, "count=99"),
    ],
)
def test_bad_input_is_refused_before_the_model_runs(tokenizer, measure, arguments, message):
    with pytest.raises(PoSEError, match=message):
        measure(None, tokenizer, **arguments, **QUIET)


def test_pairs_are_asked_for_by_depth(tokenizer):
    for prompt in prompts_of(Needle, tokenizer, [600], kinds=["kv"], depths=[0.0, 0.25, 0.5, 1.0], trials=4):
        values = re.findall(r"has value (\d+)\.", tokenizer.decode(prompt.ids))
        assert values.index(prompt.expected[0]) == round(prompt.depth * (len(values) - 1)) and len(values) > 10


@pytest.mark.parametrize("depth", [0.0, 0.5, 0.9])
def test_four_numbers_are_spread_over_the_text_and_round_again(tokenizer, depth):
    (prompt,) = prompts_of(Needle, tokenizer, [2000], kinds=["multi"], depths=[depth], trials=1)
    text = tokenizer.decode(prompt.ids)
    start, end = text.index("The grass"), text.rindex("What are the")
    found = sorted((m.start() - start) / (end - start) for m in re.finditer(r"The secret number of \w+ is", text))
    wanted = sorted((depth + i / 4) % 1 for i in range(4))
    # The lines of the numbers themselves take some of the text.
    assert found == pytest.approx(wanted, abs=0.06)


def test_numbers_have_all_their_digits(tokenizer):
    for prompt in prompts_of(Needle, tokenizer, [600], trials=25):
        assert {len(number) for number in prompt.expected} == {{"single": 7, "multi": 6, "kv": 5}[prompt.kind]}
        assert not any(number.startswith("0") for number in prompt.expected)
        numbers = re.findall(r"\d+", tokenizer.decode(prompt.ids))
        assert not any(number.startswith("0") for number in numbers)


@pytest.mark.parametrize("measure", [Needle, Topics])
def test_the_seed_changes_the_prompts_and_nothing_else_does(tokenizer, measure):
    first, again, other = (prompts_of(measure, tokenizer, [1000], trials=5, seed=seed) for seed in (0, 0, 1))
    assert [p.ids for p in first] == [p.ids for p in again]
    assert all(a.expected != b.expected for a, b in zip(first[:3], other[:3], strict=True))
    assert len({p.expected for p in first}) == len(first)


def test_figures_by_kind_length_and_depth_by_hand():
    scores = [("single", 400, 0.0, 1.0), ("single", 400, 0.5, 0.5), ("single", 800, 0.0, 0.0),
              ("single", 800, 0.0, 0.5), ("kv", 400, 0.0, 0.0), ("kv", 400, 0.5, 0.0), ("kv", 800, 0.0, 1.0),
              ("kv", 800, 0.5, 1.0)]  # fmt: skip
    result = Result("needle", "", tuple(Row(n, score, kind=kind, depth=depth) for kind, n, depth, score in scores))

    def shown(rows):
        return {cell: row.score for cell, row in rows.items()}

    assert shown(result.by_length("single")) == {400: 0.75, 800: 0.25}
    assert shown(result.by_length("kv")) == {400: 0.0, 800: 1.0}
    assert shown(result.by_depth("single")) == {(400, 0.0): 1.0, (400, 0.5): 0.5, (800, 0.0): 0.25}
    assert shown(result.by_depth("kv")) == {(400, 0.0): 0.0, (400, 0.5): 0.0, (800, 0.0): 1.0, (800, 0.5): 1.0}
    assert result.by_length("single")[800].compared == (0.0, 0.5)
    assert (result.kinds, result.lengths) == (["single", "kv"], [400, 800])


@pytest.mark.parametrize(("trials", "each"), [(2, 1), (5, 1), (6, 2)])
@pytest.mark.parametrize("measure", [Needle, Association])
def test_each_depth_is_asked_for_equally_often(tokenizer, measure, trials, each):
    """Otherwise the first depths would weigh more in the mean of a length."""
    asked = Counter((prompt.kind, prompt.depth) for prompt in prompts_of(measure, tokenizer, [400], trials=trials))
    assert asked == {(kind, depth): each for kind in measure.rules for depth in DEPTHS}


def test_an_answer_has_all_its_tokens_and_ends_where_the_model_says(tokenizer):
    model = RuleModel(constant(9), len(tokenizer))
    (prompt,) = prompts_of(Needle, tokenizer, [400], kinds=["single"], depths=[0.5], trials=1)
    asked = {"kinds": ["single"], "depths": [0.5], "trials": 1, "batch_size": 1, **QUIET}
    (row,) = needle(model, tokenizer, [400], **asked).rows
    assert row.details["answer"] == tokenizer.decode([9] * prompt.budget) and len(model.forwards) == prompt.budget
    # By its generation config, where the tokenizer knows of no end.
    model.generation_config.eos_token_id = [7, 9]
    (row,) = needle(model, tokenizer, [400], **asked).rows
    assert row.details["answer"] == ""
