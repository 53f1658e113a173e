"""Many questions on one cached text: each is answered as if alone, and models with a known answer get their score."""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, MistralConfig, MistralForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pose_plugin.evaluation import generation
from pose_plugin.evaluation.generation import cached
from pose_plugin.evaluation.measures import haystack as code
from pose_plugin.evaluation.measures.haystack import Haystack, Wording, build, filled, haystack
from pose_plugin.evaluation.prompts import token_ids
from pose_plugin.utils.errors import PoSEError
from tests.evaluation.rule_model import RuleModel, constant
from tests.pages import ROOT, recall_benchmark

TEXT = " ".join(f"Line {i} tells of the sea and the wind.\n" for i in range(120))
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ROOT / "example_configs/quickstart/base", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "example_configs/quickstart/base")


@pytest.fixture
def built(tokenizer):
    wording = Wording("Learn it.", "{name} is {key}.", "\n{name} is", ("Ann", "Bob", "Cid", "Dan"), digits=3)
    return wording, build(tokenizer, wording, token_ids(tokenizer, TEXT), 400, 3, seed=0)


def test_facts_stand_at_even_depths_behind_line_ends(tokenizer, built):
    _, text = built
    assert len(text.ids) == 400 and len(text.facts) == 3
    for fact, depth in zip(text.facts, (1 / 6, 3 / 6, 5 / 6), strict=True):
        before = tokenizer.decode(text.ids[: 400 - fact.distance])
        assert before.endswith(f"\n\n{fact.name} is {fact.key}.\n")
        assert abs((400 - fact.distance) / 400 - depth) < 0.15
    assert len({fact.name for fact in text.facts}) == 3


def test_the_same_seed_gives_the_same_text(tokenizer, built):
    wording, text = built
    filler = token_ids(tokenizer, TEXT)
    assert build(tokenizer, wording, filler, 400, 3, seed=0) == text
    assert build(tokenizer, wording, filler, 400, 3, seed=1).ids != text.ids


class Unknown(DynamicCache):
    """A cache of a kind that may forget tokens, for all that is known."""


@pytest.mark.parametrize("chunk", [None, 150])
@pytest.mark.parametrize(("kind", "attention"), [(DynamicCache, "sdpa"), (DynamicCache, "kernel"), (Unknown, "sdpa")])
def test_asking_on_the_cache_is_asking_alone(tokenizer, model, built, chunk, kind, attention, monkeypatch):
    """Answers equal greedy decoding without a cache, question by question, and the cache stays the same to the bit."""
    wording, text = built
    questions = [token_ids(tokenizer, filled(wording.question, fact.name)) for fact in text.facts]
    questions[1] += questions[0]
    with torch.no_grad():
        alone = []
        for question in questions:
            ids = torch.tensor([[*text.ids, *question]])
            for _ in range(5):
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            alone.append(ids[0, -5:].tolist())
        cache = cached(model, text.ids, chunk)
        cache.__class__ = kind
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        # A kernel that takes no mask, as FlashAttention.
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "kernel", ALL_ATTENTION_FUNCTIONS["sdpa"])
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "kernel", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        monkeypatch.setattr(model.config, "_attn_implementation_internal", attention)
        copies = []
        copying = SimpleNamespace(deepcopy=lambda each: copies.append(each) or deepcopy(each))
        monkeypatch.setattr(generation, "copy", copying)
        forwards = []
        hook = model.register_forward_pre_hook(lambda *given: forwards.append(1))
        assert generation.answer(model, cache, questions, 5) == alone
        # All questions in the same forwards, or each in its own.
        assert len(forwards) == (5 if (kind, attention) == (DynamicCache, "sdpa") else 15)
        assert len(copies) == (3 if kind is Unknown else 0)
        hook.remove()
        assert generation.answer(model, cache, questions[2:], 5) == alone[2:]
    assert cache.get_seq_length() == 400
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_model_with_a_sliding_window_is_asked_alone():
    """Its cache forgets tokens, so questions cannot be removed from it."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=50, num_key_value_heads=1, sliding_window=8, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    text, questions = code.FactText([i % 50 for i in range(30)], ()), [[3, 4], [5]]
    with torch.no_grad():
        found = generation.answer(model, cached(model, text.ids), questions, 4)
        for question, ids in zip(questions, found, strict=True):
            whole = torch.tensor([[*text.ids, *question]])
            settings = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
            expected = model.generate(whole, generation_config=GenerationConfig(**settings))
            assert expected[0, whole.shape[1] :].tolist() == ids


def test_a_question_sees_the_text_and_itself():
    owners = torch.tensor([0, 0, 1, 0, 1])
    mask = generation._apart(owners, 2, 3, torch.float32)
    assert (mask == 0).int().tolist() == [[[[1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 1]]]]


# --- the measure ----------------------------------------------------------------------------------------------------


def answering(tokenizer, key_of):
    """A model that answers the question at the end of its text with `key_of(text, name)`."""

    def rule(ids):
        text = tokenizer.decode(ids)
        end = text.rsplit("\n\n", 1)[1]
        name = next(name for name in code.NAMES if end.startswith(name))
        written = len(end) - len(name)
        answer = f" {key_of(text, name)}."
        return token_ids(tokenizer, answer[written:] or ".")[0]

    return RuleModel(rule, len(tokenizer))


def right(text, name):
    return re.search(rf"{re.escape(name)} (\d{{4}})\.", text).group(1)


def any_key(text, name):
    return random.Random(name + text[150:300]).choice(sorted(set(re.findall(r" (\d{4})\.\n", text))))


def test_a_perfect_model_and_a_blind_one(tokenizer):
    lengths = [1000, 2000]
    perfect = haystack(answering(tokenizer, right), tokenizer, [TEXT], lengths, **QUIET)
    assert set(perfect.metrics().values()) == {1.0} and perfect.k_max() == 2000
    assert [len([row for row in perfect.rows if row.kind == kind]) for kind in perfect.kinds] == [5, 10]
    assert set(perfect.by_length("2000")) <= {125, 250, 500, 1000, 2000}
    seven = token_ids(tokenizer, "7")[-1]
    blind = haystack(RuleModel(constant(seven), len(tokenizer)), tokenizer, [TEXT], lengths, **QUIET)
    assert set(blind.metrics().values()) == {0.0} and blind.k_max() == 0


def test_a_guesser_among_the_numbers_of_a_text_is_right_by_chance(tokenizer):
    texts = [TEXT[i:] for i in range(24)]
    found = haystack(answering(tokenizer, any_key), tokenizer, texts, [1000], **QUIET)
    scores = [row.score for row in found.rows]
    assert len(scores) == 120 and abs(sum(scores) / 120 - 1 / 5) < 4 * (0.2 * 0.8 / 120) ** 0.5


def test_a_text_and_the_longest_question_are_as_long_as_asked_and_short_texts_repeat(any_tokenizer):
    measure = Haystack(texts=["A tale of two lines.\nAnd no more.\n", "Another."], facts=2, **QUIET)
    measure.prepare(any_tokenizer, [900])
    first, second = measure._build(900, 0), measure._build(900, 1)
    assert len(first.ids) == len(second.ids) == 900 - measure._tail
    text = any_tokenizer.decode(first.ids, skip_special_tokens=True)
    assert text.count("A tale of two lines") > 2 and text.count("Another.") > 2
    assert first.facts != second.facts and len(first.facts) == 2


def test_a_model_that_sees_its_last_tokens_has_that_effective_length(tokenizer):
    def near(text, name):
        return right(text, name) if re.search(rf"{re.escape(name)} \d", text[-1500:]) else "0000"

    found = haystack(answering(tokenizer, near), tokenizer, [TEXT], [1000, 2000, 4000], **QUIET)
    per_token = 1500 / len(token_ids(tokenizer, TEXT[:1500]))
    assert found.k_max() == 875 and 750 < 1500 / per_token < 875


@pytest.mark.parametrize(
    ("options", "message"),
    [({"facts": 41}, "facts=41"), ({"texts": [TEXT, ""]}, "texts"), ({"lengths": [60]}, "length=")],
)
def test_what_cannot_work_is_refused_before_the_model_runs(tokenizer, options, message):
    given = {"texts": [TEXT], "lengths": [1000], **QUIET} | options
    with pytest.raises(PoSEError, match=message):
        haystack(None, tokenizer, given.pop("texts"), given.pop("lengths"), **given)


# --- the experiment of benchmarks/recall ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recall():
    with recall_benchmark() as module:
        yield module


def test_prompts_answers_and_bands_are_those_fixed_before_the_experiment(recall, tokenizer):
    """The file was written by the benchmark's code before it became a measure."""
    fixed = json.loads((Path(__file__).parent / "data" / "recall_haystack.json").read_text())
    wording, bands = recall("settings").WORDING, recall("bands")
    text = build(tokenizer, wording, token_ids(tokenizer, TEXT), fixed["length"], fixed["count"], fixed["seed"])
    assert text.ids == fixed["ids"]
    assert [[fact.name, fact.key, fact.distance] for fact in text.facts] == fixed["facts"]
    questions = [token_ids(tokenizer, filled(wording.question, fact.name)) for fact in text.facts]
    assert questions == fixed["questions"]
    assert [[text, code.score(text, "1234")] for text, _ in fixed["scores"]] == fixed["scores"]
    distances = [distance for distance, _ in fixed["bands"]]
    named = [["{}-{}".format(*code.band(distance, bands.BANDS)) for distance in distances], distances]
    assert named == [[name for _, name in fixed["bands"]], distances]
    answers = [bands.Answer("a", "1", distance, "", i % 3 == 0) for i, distance in enumerate(distances)]
    assert {name: list(counts) for name, counts in bands.by_band(answers).items()} == fixed["counts"]
