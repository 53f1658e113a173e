import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from pose_plugin.evaluation import losses as token_loss
from pose_plugin.evaluation.losses import TokenLoss
from pose_plugin.evaluation.measures.perplexity import Perplexity, perplexity, sliding
from pose_plugin.evaluation.memory import LOGIT_BYTES
from pose_plugin.evaluation.model import read
from pose_plugin.evaluation.results import Result

QUIET = {"progress": False}


def some_ids(count, seed=0, vocab=400):
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


@torch.no_grad()
def naive(model, texts, length, stride, buckets, bos=None):
    """By the definition, one token at a time, with all logits."""
    holds = length - (bos is not None)
    total, count = 0.0, 0
    sums, counts = [0.0] * buckets, [0] * buckets
    for ids in texts:
        scored = set() if bos is not None else {0}
        start = 0
        while True:
            start = min(start, len(ids) - holds)
            window = ([bos] if bos is not None else []) + ids[start : start + holds]
            logp = F.log_softmax(model(torch.tensor([window])).logits[0].double(), -1)
            for position in range(1, length):
                loss = -float(logp[position - 1, window[position]])
                where = next(b for b in range(buckets) if position < length * (b + 1) // buckets)
                sums[where] += loss
                counts[where] += 1
                token = start + position - (bos is not None)
                if token not in scored:
                    scored.add(token)
                    total, count = total + loss, count + 1
            if start + holds == len(ids):
                break
            start += stride
        assert scored == set(range(len(ids)))
    return math.exp(total / count), count, [s / c for s, c in zip(sums, counts, strict=True)]


@pytest.mark.parametrize(
    ("length", "stride", "counts", "buckets", "bos"),
    [
        (16, 4, [50, 61], 4, None),
        (16, 15, [50, 16], 4, None),
        (16, 1, [30], 4, None),
        (17, 5, [50, 61], 3, None),
        (32, 7, [100], 8, None),
        (16, 4, [50, 61], 4, 7),
        (16, 15, [50, 15], 5, 7),
    ],
)
def test_equals_the_definition_worked_out_with_all_logits(
    make_llama, tokenizer, monkeypatch, length, stride, counts, buckets, bos
):
    model = make_llama()
    texts = [some_ids(n, seed) for seed, n in enumerate(counts)]
    if bos is not None:
        monkeypatch.setattr(type(tokenizer), "bos_token_id", bos, raising=False)
    result = perplexity(
        model, tokenizer, texts, [length], stride=stride, buckets=buckets, batch_size=3, bos=bos is not None,
        **QUIET,
    )  # fmt: skip
    expected, tokens, by_bucket = naive(model, texts, length, stride, buckets, bos)
    row, parts = result.by_length()[length], [part.details for part in result.view("position")]
    assert row.score == pytest.approx(expected, rel=1e-5)
    assert row.n == tokens
    assert [part["loss"] for part in parts] == pytest.approx(by_bucket, rel=1e-5)
    ends = [length * (b + 1) // buckets for b in range(buckets)]
    assert [(part["from"], part["to"]) for part in parts] == list(zip([0, *ends], ends, strict=False))


def test_every_length_scores_the_same_tokens(make_llama, tokenizer):
    texts = [some_ids(203), some_ids(150, 1), some_ids(40, 2)]
    result = perplexity(make_llama(), tokenizer, texts, [16, 64, 150], **QUIET)
    assert {n: row.n for n, row in result.by_length().items()} == {16: 351, 64: 351, 150: 351}
    assert {n: row.details["stride"] for n, row in result.by_length().items()} == {16: 8, 64: 32, 150: 75}
    assert "2 texts (1 shorter" in result.definition


def test_a_stride_that_would_leave_tokens_out_is_lowered(make_llama, tokenizer):
    row = perplexity(make_llama(), tokenizer, [some_ids(64)], [16], stride=1024, **QUIET).by_length()[16]
    assert (row.details["stride"], row.n) == (15, 63)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(make_llama, tokenizer):
    model = make_llama()
    model.lm_head.weight.data.zero_()
    result = perplexity(model, tokenizer, [some_ids(90)], [32], **QUIET)
    assert [row.score for row in result.rows] == pytest.approx([400] * 9, rel=1e-6)


def test_logits_come_in_pieces(make_llama, tokenizer, monkeypatch):
    model = make_llama()
    whole = perplexity(model, tokenizer, [some_ids(200)], [64], **QUIET)
    monkeypatch.setattr(token_loss, "LOGIT_BYTES", 400 * 4 * 10)
    seen = []
    head = model.lm_head.forward

    def counted(hidden):
        seen.append(hidden.shape[0] * hidden.shape[1])
        return head(hidden)

    model.lm_head.forward = counted
    pieces = perplexity(model, tokenizer, [some_ids(200)], [64], batch_size=2, **QUIET)
    assert max(seen) <= 10 and len(seen) > 6 * 5
    assert model.lm_head.forward is counted
    assert pieces.by_length()[64].score == pytest.approx(whole.by_length()[64].score, rel=1e-6)
    assert LOGIT_BYTES == 64 * 2**20


# Model type: what its class does to the logits of its head.
CHANGED = {"gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8}, "granite": {"logits_scaling": 0.1},
           "cohere": {"logit_scale": 8.0}}  # fmt: skip


@pytest.mark.parametrize("how", ["foreign head", "peft", *CHANGED])
def test_models_whose_logits_are_more_than_head_of_hidden(make_llama, tokenizer, how):
    """With the model's own full logits as the reference."""
    if how in CHANGED:
        sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = AutoConfig.for_model(how, **sizes, **heads, **CHANGED[how])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    elif how == "peft":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(make_llama(), lora).eval()
    else:
        model = make_llama()
        forward = model.forward

        def own_way(input_ids, use_cache=None, logits_to_keep=0):
            output = forward(input_ids=input_ids, logits_to_keep=logits_to_keep)
            output.logits = output.logits * 3
            return output

        model.forward = own_way
    result = perplexity(model, tokenizer, [some_ids(50)], [16], stride=4, buckets=4, **QUIET)
    expected, _, by_bucket = naive(model, [some_ids(50)], 16, 4, 4)
    with torch.no_grad():
        assert token_loss.TokenLoss(model).at_head is (how != "foreign head")
    assert result.by_length()[16].score == pytest.approx(expected, rel=1e-5)
    assert [row.details["loss"] for row in result.view("position")] == pytest.approx(by_bucket, rel=1e-5)


def test_autocast_is_no_reason_for_a_forward_a_piece(make_llama, tokenizer):
    """Under mixed precision a head called beside the forward would compute in another type."""

    model = make_llama()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = TokenLoss(model)
        assert loss.at_head
        ids = torch.tensor([some_ids(40)])
        logits = model(input_ids=ids).logits[:, :-1].float()
        expected = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        torch.testing.assert_close(loss(ids), expected)
    assert "forward" not in vars(model.lm_head)


def test_a_model_without_logits_to_keep(make_llama):
    from pose_plugin.evaluation.model import keeping, prefill

    model, ids = make_llama(), torch.tensor([some_ids(40), some_ids(40, 1)])
    with torch.no_grad():
        expected, full = model(input_ids=ids, use_cache=False).logits, model.forward
        sizes = []

        def old(input_ids, use_cache=None, **cached):
            output = full(input_ids=input_ids, use_cache=use_cache, **cached)
            sizes.append(output.logits.shape[1])
            return output

        model.forward = old
        for places in (slice(-3, None), torch.tensor([1, 30])):
            with keeping(model, places) as extra:
                torch.testing.assert_close(model(ids, **extra).logits, expected[:, places])
        torch.testing.assert_close(prefill(model, ids, 16)[0], expected[:, -1], rtol=1e-4, atol=1e-4)
    assert set(sizes) == {3, 2, 1} and "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_the_name_that_the_version_and_the_model_know(name, monkeypatch):
    """transformers 5.24 renamed it, and the old name warns there; a model may keep the old one."""
    calls, model = [], torch.nn.Module()

    def forward(input_ids, use_cache, **cached):
        calls.append(cached)
        return SimpleNamespace(logits=None, **dict.fromkeys(cached, "grown"))

    output = SimpleNamespace(__dataclass_fields__=dict.fromkeys(["logits", name]))
    monkeypatch.setattr("pose_plugin.evaluation.model.CausalLMOutputWithPast", output)
    model.forward = forward
    assert read(model, torch.zeros(1, 1), "begun") == (None, "grown")
    model.forward = lambda input_ids, past_key_values, use_cache: forward(input_ids, 1, past_key_values=past_key_values)
    assert read(model, torch.zeros(1, 1), "begun") == (None, "grown")
    assert calls == [{name: "begun"}, {"past_key_values": "begun"}]


def test_some_windows_spread_evenly(make_llama, tokenizer):
    for most, starts in ((4, [0, 30, 60, 90]), (1, [0]), (99, list(range(0, 91, 5)))):
        measure = Perplexity(texts=[list(range(100))], stride=5, max_windows=most)
        measure.prepare(tokenizer, [10])
        assert [ids[0] for ids, _ in measure._windows(10)] == starts
    result = perplexity(make_llama(), tokenizer, [some_ids(100)], [10], stride=10, max_windows=4, **QUIET)
    assert (result.by_length()[10].details["windows"], result.by_length()[10].n) == (4, 36)
    assert "at most 4 windows" in result.definition


def test_windows_cover_a_text_to_its_end():
    windows = sliding([list("abcdefghijklm")], [], 8, 4)
    assert [("".join(ids), unscored) for ids, unscored in windows] == [
        ("abcdefgh", 0),
        ("efghijkl", 4),
        ("fghijklm", 7),
    ]


def test_begin_token_as_the_tokenizer_does_it(make_llama, tokenizers_by_name):
    text = "The quick brown fox jumps over the lazy dog. " * 20
    with_bos = tokenizers_by_name["with BOS"]
    result = perplexity(make_llama(len(with_bos)), with_bos, text, [32], **QUIET)
    tokens = len(with_bos(text, add_special_tokens=False)["input_ids"])
    assert result.by_length()[32].n == tokens
    assert "begin-of-text token is before every window" in result.definition
    without = tokenizers_by_name["single digits"]
    result = perplexity(make_llama(), without, text, [32], **QUIET)
    assert result.by_length()[32].n == len(without(text)["input_ids"]) - 1


def test_state_is_as_before(make_llama, tokenizer):
    model = make_llama(attention_dropout=0.5).train()
    state = torch.get_rng_state()
    first = perplexity(model, tokenizer, [some_ids(50)], [16], **QUIET)
    assert model.training and torch.get_rng_state().equal(state)
    assert perplexity(model, tokenizer, [some_ids(50)], [16], **QUIET) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, r"lengths=\[\]"),
        ({"lengths": [1]}, "length=1"),
        ({"lengths": [16, 101]}, r"length=101 .*\(100 tokens"),
        ({"lengths": [60], "max_tokens": 50}, "max_tokens=50"),
        ({"lengths": [16], "stride": 0}, "stride"),
        ({"lengths": [16], "buckets": 0}, "buckets"),
        ({"lengths": [16], "bos": True}, "no begin-of-text token"),
    ],
)
def test_bad_input_is_refused_before_the_model_runs(tokenizer, changes, message):
    with pytest.raises(ValueError, match=message):
        perplexity(None, tokenizer, [some_ids(100), some_ids(20)], **changes, **QUIET)


def test_the_losses_of_windows_are_the_means_of_what_each_scores(make_llama, tokenizer):
    """So that two models are compared window by window; they are kept on disk with the rest."""
    result = perplexity(make_llama(), tokenizer, [some_ids(32)], [16], stride=8, batch_size=2, **QUIET)
    row = result.by_length()[16]
    scored = [15, 8, 8]
    loss = sum(loss * n for loss, n in zip(row.samples, scored, strict=True)) / 31
    assert math.exp(loss) == pytest.approx(row.score)
    first = perplexity(make_llama(), tokenizer, [some_ids(32)[:16]], [16], **QUIET).by_length()[16]
    assert row.samples[0] == pytest.approx(first.details["loss"], rel=1e-5)
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_losses_are_made_in_float32_whatever_the_weights_are_in(make_llama):
    model, ids = make_llama().to(torch.bfloat16), torch.tensor([some_ids(40)])
    with torch.no_grad():
        found = token_loss.TokenLoss(model)(ids)
        logits = model(input_ids=ids).logits[:, :-1].float()
    torch.testing.assert_close(found, F.cross_entropy(logits.mT, ids[:, 1:], reduction="none"))


def test_a_head_of_its_own_reads_in_chunks_too(make_llama, monkeypatch):
    model, ids, sizes = make_llama(), torch.tensor([some_ids(40)]), []
    forward = model.forward

    def counted(input_ids, logits_to_keep=0, **rest):
        sizes.append(input_ids.shape[1])
        return forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **rest)

    with torch.no_grad():
        loss = token_loss.TokenLoss(model)
        loss.at_head, whole = False, loss(ids)
        monkeypatch.setattr(model, "forward", counted)
        torch.testing.assert_close(loss(ids, 8), whole, rtol=1e-4, atol=1e-4)
    assert sizes == [8] * 5
