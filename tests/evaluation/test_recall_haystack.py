"""benchmarks/recall: many questions on one cached haystack are what each question alone is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
TEXT = " ".join(f"Line {i} tells of the sea and the wind.\n" for i in range(60))


@pytest.fixture(scope="module")
def haystack():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("recall.haystack")
    for name in [name for name in sys.modules if name == "common" or name.split(".")[0] in ("recall", "smollm2")]:
        del sys.modules[name]
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ROOT / "example_configs/quickstart/base", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "example_configs/quickstart/base")


@pytest.fixture
def built(haystack, tokenizer):
    wording = haystack.Wording("Learn it.", "{name} is {key}.", "\n{name} is", ("Ann", "Bob", "Cid", "Dan"), digits=3)
    return wording, haystack.build(tokenizer, wording, haystack.token_ids(tokenizer, TEXT), 400, 3, seed=0)


def test_facts_stand_at_even_depths_behind_line_ends(haystack, tokenizer, built):
    _, hay = built
    assert len(hay.ids) == 400 and len(hay.facts) == 3
    for fact, depth in zip(hay.facts, (1 / 6, 3 / 6, 5 / 6), strict=True):
        before = tokenizer.decode(hay.ids[: 400 - fact.distance])
        assert before.endswith(f"\n\n{fact.name} is {fact.key}.\n")
        assert abs((400 - fact.distance) / 400 - depth) < 0.15
    assert len({fact.name for fact in hay.facts}) == 3


def test_the_same_seed_gives_the_same_haystack(haystack, tokenizer, built):
    wording, hay = built
    filler = haystack.token_ids(tokenizer, TEXT)
    assert haystack.build(tokenizer, wording, filler, 400, 3, seed=0) == hay
    assert haystack.build(tokenizer, wording, filler, 400, 3, seed=1).ids != hay.ids


def test_too_short_a_text_is_refused(haystack, tokenizer, built):
    with pytest.raises(ValueError, match="length=400"):
        haystack.build(tokenizer, built[0], [5] * 10, 400, 3, seed=0)


def test_asking_together_on_the_cache_is_asking_alone(haystack, tokenizer, model, built):
    """Answers equal greedy decoding without a cache, question by question, and the cache stays the same to the bit."""
    wording, hay = built
    questions = [haystack.token_ids(tokenizer, haystack.filled(wording.question, fact.name)) for fact in hay.facts]
    questions[1] += questions[0]
    with torch.no_grad():
        alone = []
        for question in questions:
            ids = torch.tensor([[*hay.ids, *question]])
            for _ in range(5):
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            alone.append(ids[0, -5:].tolist())
        for chunk in (None, 150):
            cache = haystack.read(model, hay, chunk=chunk)
            before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            assert haystack.answer(model, cache, questions, 5) == alone
            assert haystack.answer(model, cache, questions[2:], 5) == alone[2:]
            assert cache.get_seq_length() == 400
            for layer, (keys, values) in zip(cache.layers, before, strict=True):
                assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_question_sees_the_text_and_itself(haystack):
    owners = torch.tensor([0, 0, 1, 0, 1])
    mask = haystack._apart(owners, 2, 3, torch.float32)
    assert (mask == 0).int().tolist() == [[[[1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 1]]]]


@pytest.mark.parametrize(
    ("text", "found"),
    [(" 12345.", True), ("\nNo. 12345", True), (" 123456", True), (" 1234", False), (" 9 12345", False), ("", False)],
)
def test_the_first_run_of_digits_counts(haystack, text, found):
    assert haystack.score(text, "12345") is found


def test_bands(haystack):
    answers = [haystack.Answer("a", "1", d, "", d % 2 == 0) for d in (0, 2047, 2048, 9000, 40000)]
    assert haystack.by_band(answers) == {
        "0-2048": (1, 2),
        "2048-4096": (1, 1),
        "8192-16384": (1, 1),
        "24576-32768": (1, 1),
    }
