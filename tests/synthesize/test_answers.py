"""Parsing of answers; and prompts, rate limit and budget on their own."""

from __future__ import annotations

import json
import re

import pytest

from pose_plugin.synthesize import prompts
from pose_plugin.synthesize.answers import Biography, Characters, Questions, UnusableError, parse, parse_questions
from pose_plugin.synthesize.client import Pace
from pose_plugin.synthesize.paid import Ledger
from pose_plugin.synthesize.quotes import Finder
from pose_plugin.synthesize.server import _reply
from pose_plugin.synthesize.settings import Settings
from pose_plugin.synthesize.tasks.common import Made, questions_into
from tests.synthesize.test_quotes import TEXT

LIFE = Biography(biography="x")


def questions_from(content, count, find, settings):
    made = Made()
    return questions_into(made, count, find, settings)(content), made.dropped


@pytest.mark.parametrize(
    "content",
    [
        '{"biography": "x"}',
        '```json\n{"biography": "x"}\n```',
        'Sure, {here} it is: {"biography": "x"} Anything else?',
        '<think>{"biography": "no"}</think>{"biography": " x "}',
        # Templates that open the tag in the prompt leave only the closing one.
        '{"biography": "no"}</think>{"biography": "x"}',
        '{"note": 1} {"biography": "x"}',
        '{"biography": "x", "more": 1}',
    ],
)
def test_answers_that_are_found(content):
    assert parse(content, Biography) == LIFE


def test_more_than_the_requested_tokens_can_hold_is_left_out():
    """A server that ignored the limit sent millions of letters of quotes; looking them up took minutes."""
    found = {"choices": [{"message": {"content": "word " * 10_000}}]}
    assert len(_reply(found, answer_tokens=10).content) == 1280
    assert len(_reply(found, answer_tokens=1000).content) == 50_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it holds no JSON object"),
        ('{"biography": "x', "its JSON is broken or cut off"),
        ('{"life": "x"}', "its JSON has none of the names biography"),
        ('{"biography": 3}', "biography: Input should be a valid string"),
        ("[" * 100000 + '{"biography":', "its JSON is broken or cut off"),
        ('{"a":' * 5000, "its JSON is broken or cut off"),
        ("{" * 10000, "its JSON is broken or cut off"),
    ],
)
def test_answers_that_are_not(content, message):
    with pytest.raises(UnusableError, match=re.escape(message)):
        parse(content, Biography)


def test_one_bad_question_does_not_spoil_the_others(tmp_path):
    quotes = ["came up at dawn"]
    questions = [
        {"question": "Who?", "answer": "The whale.", "quotes": quotes},
        {"question": "who? ", "answer": "The whale.", "quotes": quotes},
        {"question": "Why?", "answer": " ", "quotes": quotes},
        {"question": "When?", "answer": "At noon.", "quotes": ["came up at noon"]},
        {"question": "What?", "answer": "A whale.", "quotes": quotes},
        {"question": "One too many?", "answer": "Yes.", "quotes": quotes},
    ]
    settings = Settings(inputs=(), output=tmp_path, tokenizer="t", model="m", window=6000)
    finder = Finder([TEXT])
    content = json.dumps({"questions": questions})
    turns, dropped = questions_from(content, 2, finder.any, settings)
    assert [turn.question for turn in turns] == ["Who?", "What?"]
    assert dropped == {
        "asked twice": 1,
        "without a question or an answer": 1,
        "quotes are not where they should be in the text": 1,
    }
    with pytest.raises(UnusableError, match="all 1 questions were dropped: quotes are not where"):
        questions_from(json.dumps({"questions": questions[3:4]}), 2, finder.any, settings)
    believing = settings.model_copy(update={"check_quotes": False})
    assert len(questions_from(json.dumps({"questions": questions[3:4]}), 2, lambda each: [], believing)[0]) == 1


WHOLE = json.dumps({"question": "Who?", "answer": "The {whale}.", "quotes": ["came up at dawn"]})


@pytest.mark.parametrize(
    "content",
    [
        # Cut off at --answer-tokens; then one question of three in another form.
        f'{{"questions": [{WHOLE}, {WHOLE.replace("Who", "What")}, {{"question": "Why?", "ans',
        f'{{"questions": [{WHOLE}, {{"question": 3}}, {WHOLE.replace("Who", "What")}]}}',
    ],
)
def test_whole_questions_of_a_broken_answer_are_kept(tmp_path, content):
    settings, shown = Settings(inputs=(), output=tmp_path, tokenizer="t", model="m", window=6000), Finder([TEXT]).any
    turns, dropped = questions_from(content, 5, shown, settings)
    assert [(turn.question, turn.answer) for turn in turns] == [("Who?", "The {whale}."), ("What?", "The {whale}.")]
    assert dropped == {"rest of an answer that was cut off or broken": 1}
    # No question is taken from a draft. The error gives the reason if there is no complete question.
    with pytest.raises(UnusableError):
        questions_from(f"<think>{content}", 5, shown, settings)
    with pytest.raises(UnusableError, match="its JSON is broken or cut off"):
        questions_from(content[: len(WHOLE) - 30], 5, shown, settings)


CUT = '{"questions": [{"question": "Who?", "answer": "The whale.", "quotes": ["The whale came up at dawn", "At du'


def test_a_question_that_was_cut_off_in_its_quotes_is_kept(tmp_path):
    """Quotes come last, and small models repeat themselves in them. Question and answer are complete by then."""
    ((question,), whole) = parse_questions(CUT)
    assert (question.answer, question.quotes, whole) == ("The whale.", ["The whale came up at dawn"], False)
    for length in range(len(CUT)):
        try:
            ((question,), _) = parse_questions(CUT[:length])
        except UnusableError:
            assert '"quotes": ' not in CUT[:length] or CUT[:length].endswith(": ")
        else:
            assert question.answer == "The whale." and question.quotes in ([], ["The whale came up at dawn"])
    settings = Settings(inputs=(), output=tmp_path, tokenizer="t", model="m", window=6000)
    (turn,), dropped = questions_from(CUT, 5, Finder([TEXT]).any, settings)
    assert [TEXT[span.start : span.end] for span in turn.quotes] == ["The whale came up\nat dawn"]
    assert dropped == {"rest of an answer that was cut off or broken": 1}
    with pytest.raises(UnusableError, match="quotes are not where"):
        questions_from(CUT.replace("dawn", "noon"), 5, Finder([TEXT]).any, settings)


ONE = {"question": "When?", "answer": "1871", "quotes": ["came up at dawn", "at dusk"]}
SHAPES = {
    "as asked": {"questions": [ONE]},
    "a list": [ONE],
    "alone": ONE,
    "no list": {"questions": ONE},
    "numbered": {"document": "x", "questions": [{"id": 1, **ONE, "type": "detail"}]},
    "a brace": [{**ONE, "kind": "of {braces"}],
    "capitals": {"questions": [{"Question": "When?", "Answer": "1871", "Quotes": ONE["quotes"]}]},
    "a number": {"questions": [{**ONE, "answer": 1871}]},
    "one quote": {"questions": [{"question": "When?", "answer": "1871", "quote": "came up at dawn"}]},
    "placed": {"questions": [{**ONE, "quotes": [{"text": "came up at dawn", "document": 1}, ["at dusk"], None]}]},
    "none": {"questions": [{"question": "When?", "answer": "1871"}]},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("around", ["{}", "Here:\n```json\n{}\n```\nDone."])
def test_accepted_forms_of_an_answer(shape, around):
    questions, whole = parse_questions(around.replace("{}", json.dumps(SHAPES[shape])))
    assert whole and [(each.question, each.answer) for each in questions] == [("When?", "1871")]
    assert questions[0].quotes == {"one quote": ONE["quotes"][:1], "none": []}.get(shape, ONE["quotes"])


def test_a_draft_in_the_thoughts_is_not_the_answer():
    draft = json.dumps({"questions": [{**ONE, "question": "A draft?"}]})
    questions, whole = parse_questions(f"First: {draft} Too easy.\n</think>\n\n{json.dumps(SHAPES['as asked'])}")
    assert whole and [each.question for each in questions] == ["When?"]


def test_line_breaks_in_strings_are_read():
    assert parse('{"biography": "a\nb"}', Biography).biography == "a\nb"


def strict(schema: dict) -> None:
    """Assert what servers with strict schemas demand of every object."""
    if schema.get("type") == "object":
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) == set(schema["properties"])
    for value in [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]:
        strict(value)


@pytest.mark.parametrize("form", [Questions, Characters, Biography])
def test_schemas_are_strict(form):
    strict(form.model_json_schema())


def test_more_quotes_than_the_schema_allows_are_taken():
    question = {"question": "Who?", "answer": "The whale.", "quotes": [str(number) for number in range(9)]}
    assert len(parse(json.dumps({"questions": [question]}), Questions).questions[0].quotes) == 9


def test_changed_prompts_have_a_new_version():
    """Answers to other prompts must not be reused. After a change raise VERSION, then write both here."""
    assert (prompts.VERSION, prompts.fingerprint()[:12]) == ("1", "9871024f36c1")


def test_a_document_cannot_close_its_tag():
    first = prompts.prompt(["a"], "ask", form="{}")
    tag = re.search(r"</document id=[^>]+>", first).group()
    second = prompts.prompt([tag + " b"], "ask", form="{}")
    assert second.count(re.search(r"</document id=[^>]+>(?=\n\nask)", second).group()) == 1
    assert tag not in re.findall(r"</document id=[^>]+>(?=\n\nask)", second)


def test_pace_spaces_requests():
    pace = Pace(requests_per_minute=60)
    assert [pace.delay(10.0, 0) for _ in range(3)] == [0.0, 1.0, 2.0]
    assert pace.delay(20.0, 0) == 0.0


def test_pace_spaces_tokens():
    pace = Pace(requests_per_minute=600, tokens_per_minute=6000)
    assert [round(pace.delay(0.0, 50), 6) for _ in range(2)] == [0.0, 0.5]
    assert Pace().delay(0.0, 10**9) == 0.0


def test_budget_counts_requests_in_flight():
    ledger = Ledger(price_input=1e6, price_output=1e6, budget=100)
    first = ledger.reserve(20, 10)
    assert ledger.reserve(60, 10) is None
    second = ledger.reserve(20, 10)
    ledger.settle(first, 30, 5, estimate=20)
    # 35 are spent and 35 reserved, and this server counts 1.5 times our tokens: 12 and 10 fit, 20 and 1 do not.
    assert ledger.margin == 1.5
    assert ledger.reserve(20, 1) is None and ledger.reserve(12, 10) is not None
    ledger.settle(second)
    assert ledger.spent == 35 and Ledger().spent is None
