import random

import pytest
from tokenizers.processors import TemplateProcessing

from pose_plugin.evaluation.prompts import PasskeyBuilder, PasskeyTemplate, leading_ids, random_key
from pose_plugin.utils.errors import PoSEError
from tests import models


def build_document(tokenizer, *arguments):
    return PasskeyBuilder(tokenizer).document(*arguments)


LENGTHS = [180, 181, 182, 190, 233, 256, 777, 1024, 2048]


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.77, 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_and_answer_are_exactly_length_tokens(any_tokenizer, length, depth):
    document = build_document(any_tokenizer, length, depth, "12345")
    assert len(document.input_ids) == length
    assert document.prompt + document.answer == document.input_ids
    assert any_tokenizer.decode(document.answer).strip() == "12345"


def test_text_reads_as_the_template(any_tokenizer):
    template = PasskeyTemplate()
    lines = build_document(any_tokenizer, 400, 0.5, "54321").text.split("\n")
    assert lines[0] == template.prefix
    assert lines[1].startswith("The grass is green. The sky is blue. The sun is yellow.")
    assert lines[2] == "The pass key is 54321. Remember it. 54321 is the pass key."
    assert lines[4] == "What is the pass key? The pass key is 54321"
    filler = lines[1] + lines[3]
    assert (template.filler * 20).startswith(filler) and len(filler) > 3 * len(template.filler)


def test_depth_is_the_share_of_filler_before_the_key(tokenizer):
    builder = PasskeyBuilder(tokenizer)
    start, end = (builder.document(1000, depth, "12345").text.split("\n") for depth in (0, 1))
    assert start[1] == "" and start[2].startswith("The pass key is 12345")
    assert end[3] == "" and end[2].startswith("The pass key is 12345")
    quarter = builder.document(1000, 0.25, "12345").text.split("\n")
    ids = [len(tokenizer(quarter[i], add_special_tokens=False)["input_ids"]) for i in (1, 3)]
    assert ids[0] / sum(ids) == pytest.approx(0.25, abs=0.01)


def test_begin_token_where_the_tokenizer_puts_one(tokenizers_by_name):
    with_bos = tokenizers_by_name["with BOS"]
    ids = build_document(with_bos, 300, 0.5, "12345").prompt
    assert ids[0] == with_bos.bos_token_id and ids.count(with_bos.bos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "leading"),
    [("$A", []), ("$A </s>", []), ("</s> <unk> $A", [2, 0]), ("<s> <s> $A </s>", [1, 1])],
)
def test_all_that_a_tokenizer_puts_before_a_text(template, leading):
    """ChatGLM puts two there, and names neither as begin-of-text."""
    tokenizer = models.sentencepiece_tokenizer()
    names = {"<s>": 1, "</s>": 2, "<unk>": 0}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[*names.items()])
    document = build_document(tokenizer, 300, 0.5, "12345")
    assert leading_ids(tokenizer) == leading and len(document.input_ids) == 300
    assert document.input_ids[: len(leading) + 1] == tokenizer("There is")["input_ids"][: len(leading) + 1]


def test_pieces_read_as_in_one_text(any_tokenizer):
    """No stray word marks where the pieces meet: the ids are those of the whole text, if no word was cut."""
    template = PasskeyTemplate(filler="One two. ", question="Which key? It is", prefix="Find the key.")
    builder = PasskeyBuilder(any_tokenizer, template)
    document = builder.document(builder.fixed_tokens(), 0, "12345")
    hidden = "The pass key is 12345. Remember it. 12345 is the pass key."
    whole = f"Find the key.\n\n{hidden}\n\nWhich key? It is 12345"
    assert document.text == whole
    assert document.input_ids == any_tokenizer(whole)["input_ids"]


def test_real_text_as_filler(tokenizer):
    text = " ".join(f"word{i}" for i in range(2000))
    builder = PasskeyBuilder(tokenizer, filler=text)
    first = builder.document(300, 0.5, "12345", start=0.0)
    last = builder.document(300, 0.5, "12345", start=1.0)
    assert len(first.input_ids) == len(last.input_ids) == 300
    assert first.text.split("\n")[1].startswith("word0 word1 word2 ")
    assert last.text.split("\n")[3].rstrip().endswith("word1999") or "word1999" in last.text
    assert "grass" not in first.text
    short = PasskeyBuilder(tokenizer, filler="Too short.").document(300, 0.5, "12345")
    assert len(short.input_ids) == 300 and short.text.count("Too short.") > 3


def test_a_builder_gives_the_same_whatever_it_built_before(tokenizer):
    text = " ".join(f"word{i}" for i in range(100))
    used, fresh = (PasskeyBuilder(tokenizer, filler=text) for _ in range(2))
    used.document(2000, 0.5, "12345")
    assert used.document(300, 0.3, "12345", start=0.5) == fresh.document(300, 0.3, "12345", start=0.5)


def test_too_short_a_length_names_the_minimum(any_tokenizer):
    least = PasskeyBuilder(any_tokenizer).fixed_tokens()
    assert len(build_document(any_tokenizer, least, 0.5, "12345").input_ids) == least
    with pytest.raises(PoSEError, match=f"length={least - 1} is smaller .* at least {least}"):
        build_document(any_tokenizer, least - 1, 0.5, "12345")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: build_document(t, 300, 1.5, "12345"), "depth=1.5 is outside"),
        (lambda t: PasskeyBuilder(t, filler="  "), "filler is empty"),
        (lambda t: PasskeyBuilder(t, PasskeyTemplate(filler="")), "filler is empty"),
        (lambda t: PasskeyTemplate(key_sentence="no key"), "key_sentence='no key' has no {key}"),
    ],
)
def test_bad_input(tokenizer, make, message):
    with pytest.raises(PoSEError, match=message):
        make(tokenizer)


def test_keys_have_five_digits():
    rng = random.Random(0)
    keys = {random_key(rng) for _ in range(500)}
    assert len(keys) > 450 and all(len(key) == 5 and key[0] != "0" for key in keys)
