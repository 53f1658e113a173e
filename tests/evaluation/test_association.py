"""Retrieval without shared words: the pairs share none, and scorers with known answers."""

import re

import pytest

from pose_plugin.evaluation.measures.association import FACTS, NAMES, PAIRS, Association, association
from pose_plugin.evaluation.prompts import GRASS
from pose_plugin.utils.errors import PoSEError
from tests.evaluation.rule_model import RuleModel, constant
from tests.evaluation.test_retrieval import model_of, prompts_of

FUNCTION = {"a", "an", "at", "below", "before", "from", "good", "has", "in", "is", "of", "on", "or", "person", "the",
            "to", "which"}  # fmt: skip


def words(text):
    return set(re.findall(r"[a-z]+", text.lower())) - FUNCTION


def test_no_question_shares_a_content_word_with_a_fact_or_the_filler():
    for does, question in PAIRS:
        assert not any(words(question) & words(other) for other in (does, GRASS)), question
    assert len({question for _, question in PAIRS}) == len(PAIRS) and len(set(NAMES)) == len(NAMES)


PLACES = {
    "france": {"calais", "eiffel", "louvre", "paris"},
    "italy": {"colosseum", "rome", "venice"},
    "egypt": {"cairo", "giza"},
    "australia": {"melbourne", "sydney"},
    "england": {"buckingham", "dover", "london", "wimbledon"},
    "japan": {"fuji", "tokyo"},
    "india": {"mahal", "mumbai"},
    "brazil": {"janeiro", "rio"},
}


def test_no_fact_answers_another_question():
    """Who won Wimbledon or swam to Calais has been to England and France too."""
    asked = [next(iter(words(question) & set(PLACES)), None) for _, question in PAIRS]
    assert set(asked) - {None} == set(PLACES)
    for (does, _), country in zip(PAIRS, asked, strict=True):
        implied = {name for name, places in PLACES.items() if words(does) & (places | {name})}
        assert implied == {country} - {None}, does


def right_person(text):
    """Reads the answer out of the prompt's text."""
    question = re.search(r"Question: (Which person .+?\?) Give", text).group(1)
    (does,) = [d for d, implied in PAIRS if question in (f"Which person {d}?", implied)]
    return re.search(rf"(\w+) {re.escape(does)}\.", text).group(1)


def first_person(text):
    return re.search("|".join(NAMES), text).group()


def test_prompts_have_the_exact_length_and_both_kinds_the_same_text(any_tokenizer):
    prompts = prompts_of(Association, any_tokenizer, [400, 515], trials=5)
    assert len(prompts) == 20 and {p.depth for p in prompts} == {0.0, 0.25, 0.5, 0.75, 1.0}
    texts = [any_tokenizer.decode(p.ids, skip_special_tokens=True) for p in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        assert right_person(text) == prompt.expected[0]
        assert len(re.findall("|".join(NAMES), text)) == FACTS
        at = text.index(prompt.expected[0]) / len(text)
        assert abs(at - prompt.depth) < 0.4
    assert [p.expected for p in prompts[:10]] == [p.expected for p in prompts[10:]]
    assert all(a != b for a, b in zip(texts[:10], texts[10:], strict=True))


def test_a_perfect_and_a_blind_model_and_one_that_guesses(tokenizer):
    quiet = {"progress": False, "batch_size": 1}
    perfect = association(model_of(tokenizer, right_person), tokenizer, [400], trials=5, **quiet)
    assert perfect.metrics() == {"association/literal/400": 1.0, "association/associated/400": 1.0}
    assert {row.note for row in perfect.rows} == {"chance 1/4"}
    comma = tokenizer(",", add_special_tokens=False)["input_ids"][-1]
    blind = association(RuleModel(constant(comma), len(tokenizer)), tokenizer, [400], trials=5, **quiet)
    assert set(blind.metrics().values()) == {0.0}
    # The person that is mentioned first is the right one at depth 0, and at no other depth.
    first = association(model_of(tokenizer, first_person), tokenizer, [400], trials=20, **quiet)
    assert first.by_depth("literal")[400, 0.0].score == 1.0
    assert first.by_length("associated")[400].score < 0.5


def test_a_length_without_room_is_an_error(tokenizer):
    with pytest.raises(PoSEError, match="length=100"):
        Association(trials=5).prepare(tokenizer, [100])
