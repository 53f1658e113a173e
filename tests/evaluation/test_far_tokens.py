"""LongPPL and the gap probe: figures by hand, and models whose answer is known."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from pose_plugin.evaluation import memory
from pose_plugin.evaluation.losses import losses_of
from pose_plugin.evaluation.measures.gap import Gap, gap_probe
from pose_plugin.evaluation.measures.longppl import LongPPL, longppl
from pose_plugin.utils.errors import PoSEError

QUIET = {"progress": False}
VOCAB = 50


class Copier(LlamaForCausalLM):
    """Gives probability `sure` to the token that stood `back` places before, where it can see that far, else 1/V."""

    def __init__(self, back: int, sure: float = 0.9):
        super().__init__(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
            )
        )
        self.back, self.sure = back, sure

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0, **unused):
        ids = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], 1)
        logits = torch.zeros(*ids.shape, VOCAB)
        for i in range(self.back - 1, ids.shape[1]):
            # What comes at i + 1 is what stood at i + 1 - back.
            target = ids[:, i + 1 - self.back]
            other = math.log((1 - self.sure) / (VOCAB - 1))
            logits[:, i] = other
            logits[torch.arange(len(ids)), i, target] = math.log(self.sure)
        logits = logits[:, ids.shape[1] - input_ids.shape[1] :]
        keep = logits_to_keep
        logits = logits[:, keep] if isinstance(keep, torch.Tensor) else logits[:, -keep:] if keep else logits
        return CausalLMOutputWithPast(logits=logits, past_key_values=ids if use_cache else None)


def repeated(back: int, times: int, seed: int = 0) -> list[int]:
    picker = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (back,), generator=picker).tolist() * times


def asked(evaluator, tokenizer, texts, length, short, **options):
    """LongPPL at one length, its evaluator asked."""
    measure = LongPPL(texts=texts, short_context=short, evaluator="copier", **options, **QUIET)
    measure.prepare(tokenizer, [length])
    measure.answers = {length: measure.ask(evaluator, length)}
    return measure


def test_key_tokens_are_those_that_only_the_far_text_tells(tokenizer):
    """The copy is 30 back: the last 16 to 20 tokens do not hold it, the whole text does."""
    texts = [repeated(30, 3)[:80], repeated(30, 3, seed=1)[:80]]
    measure = asked(Copier(30), tokenizer, texts, 80, 16)
    assert measure.answers == {80: [list(range(30, 80))] * 2}
    result = measure.run(Copier(30), 80)
    assert result.by_length()[80].score == pytest.approx(1 / 0.9, rel=1e-5) and result.by_length()[80].n == 100
    blind = measure.run(Copier(500), 80)
    assert blind.metrics() == {"longppl/80": pytest.approx(VOCAB, rel=1e-5)}
    assert result.by_length()[80].samples == pytest.approx((-math.log(0.9),) * 2, rel=1e-4)
    # All tokens beyond the short context: 14 at 1/V, 50 copied.
    plain = (14 * math.log(VOCAB) - 50 * math.log(0.9)) / 64
    assert result.by_length()[80].details["plain_loss"] == pytest.approx(plain, rel=1e-5)
    assert result.by_length()[80].details["plain_tokens"] == 128
    again = longppl(Copier(500), Copier(30), tokenizer, texts, [80], short_context=16, evaluator="copier", **QUIET)
    assert again == blind


def test_what_the_near_text_tells_is_not_a_key_token(tokenizer):
    with pytest.raises(PoSEError, match=r"length=80.* short_context=16"):
        asked(Copier(10), tokenizer, [repeated(10, 8)], 80, 16)


@pytest.mark.parametrize(("alpha", "beta", "found"), [(3.7, -2, 50), (3.9, -2, 0), (2, -0.2, 50), (2, -0.1, 0)])
def test_both_thresholds(tokenizer, alpha, beta, found):
    """The gain is log(0.9 · 50) = 3.81, the log-probability -0.105."""
    texts = [repeated(30, 3)[:80]]
    if found:
        (keys,) = asked(Copier(30), tokenizer, texts, 80, 16, alpha=alpha, beta=beta).answers[80]
        assert len(keys) == found
    else:
        with pytest.raises(PoSEError, match="length=80"):
            asked(Copier(30), tokenizer, texts, 80, 16, alpha=alpha, beta=beta)


def test_a_begin_token_counts_in_the_length(tokenizers_by_name):
    measure = asked(Copier(30), tokenizers_by_name["with BOS"], [repeated(30, 3)[:79]], 80, 16)
    # Position 0 is the begin token, so the first copy is at 31.
    assert measure.answers == {80: [list(range(31, 80))]}
    details = measure.run(Copier(30), 80).by_length()[80].details
    # Beyond the begin token and the short context: 13 at 1/V, one that is taken for the begin token, 49 copied.
    assert details["plain_tokens"] == 63
    wrong = math.log((VOCAB - 1) / 0.1)
    assert details["plain_loss"] == pytest.approx((13 * math.log(VOCAB) + wrong - 49 * math.log(0.9)) / 63, rel=1e-5)


def test_how_many_texts_a_length_reads(tokenizer):
    texts = [repeated(30, 3)[:70], repeated(30, 3, seed=1)]
    result = longppl(Copier(30), Copier(30), tokenizer, texts, [16, 70, 90], short_context=16, evaluator="c", **QUIET)
    assert result.lengths == [70, 90] and "lengths of up to 16 tokens are left out" in result.definition
    assert result.described.endswith("70: 80 of 108 tokens in 2 texts are key; 90: 60 of 74 tokens in 1 text are key.")


def test_texts_are_cut_to_the_length(tokenizer):
    measures = [asked(Copier(30), tokenizer, [repeated(30, 3)[:n]], 70, 16) for n in (70, 90)]
    assert measures[0].answers == measures[1].answers == {70: [list(range(30, 70))]}
    assert measures[0].run(Copier(30), 70) == measures[1].run(Copier(30), 70)


@pytest.mark.parametrize("name", ["single digits", "with BOS"])
def test_the_forecast_counts_what_the_evaluator_reads(tokenizers_by_name, monkeypatch, name):
    read = []

    def counted(model, windows, *rest):
        read.append((len(windows[0]), len(windows)))
        return losses_of(model, windows, *rest)

    monkeypatch.setattr("pose_plugin.evaluation.losses.losses_of", counted)
    measure = asked(Copier(30), tokenizers_by_name[name], [repeated(30, 4)] * 3, 82, 16)
    whole, pieces = measure.ask_work(82)
    assert read.pop(0) == (whole.length, whole.sequences) == (82, 3)
    # The last piece of a text is shorter.
    assert (max(n for n, _ in read), sum(count for _, count in read)) == (pieces.length, pieces.sequences)


def test_longppl_in_chunks_is_the_same(tokenizer, make_llama, monkeypatch):
    text = torch.randint(0, 400, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    whole = asked(make_llama(), tokenizer, [text], 120, 40, alpha=-9, beta=-99)
    monkeypatch.setattr(memory, "tokens_at_once", lambda model, length, batch_size: 17)
    chunked = asked(make_llama(), tokenizer, [text], 120, 40, alpha=-9, beta=-99)
    assert whole.answers == chunked.answers and len(whole.answers[120][0]) > 40


@pytest.mark.parametrize(("length", "short", "message"), [(80, 80, "short_context=80"), (900, 16, "length=900")])
def test_longppl_bad_input(tokenizer, length, short, message):
    with pytest.raises(PoSEError, match=message):
        asked(Copier(30), tokenizer, [repeated(30, 3)], length, short)


def test_longppl_other_texts(tokenizer):
    measure = LongPPL(texts=[repeated(30, 3)], short_context=16, answers={80: [[1], [2]]}, **QUIET)
    measure.prepare(tokenizer, [80])
    with pytest.raises(PoSEError, match="1 texts, but key tokens of 2"):
        measure.run(Copier(30), 80)


def test_the_gap_probe_by_hand(make_llama, tokenizer):
    """Moved tokens see those before them: the loss is that of one document with a jump, under a written-out mask."""
    model = make_llama()
    ids = torch.randint(0, 400, (1, 40), generator=torch.Generator().manual_seed(3))
    result = gap_probe(model, tokenizer, [ids[0].tolist()], [100, 250], tokens=40, **QUIET)
    assert [(row.length, row.n) for row in result.rows] == [(40, 16), (100, 16), (250, 16)]
    mask = torch.ones(40, 40).tril()[None, None].bool()
    for length, probe in result.by_length().items():
        positions = torch.arange(40)
        positions[24:] += length - 40
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=positions[None], attention_mask=mask, use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits[0, 23:-1], ids[0, 24:])
        assert probe.score == pytest.approx(float(expected), rel=1e-4)
    assert len({round(probe.score, 3) for probe in result.rows}) == 3


def test_a_text_without_key_tokens_has_no_loss_of_its_own(tokenizer):
    """Means over the key tokens of each text: three with the copier's loss, one with the blind model's."""
    texts = [repeated(30, 3)[:80], repeated(30, 3, seed=1)[:80], repeated(30, 3, seed=2)[:80]]
    measure = LongPPL(texts=texts, short_context=16, answers={80: [[40, 50, 60], [], [20, 70]]}, **QUIET)
    measure.prepare(tokenizer, [80])
    (row,) = measure.run(Copier(30), 80).rows
    copied, blind = -math.log(0.9), math.log(VOCAB)
    assert row.samples == pytest.approx((copied, (blind + copied) / 2), rel=1e-4)
    assert row.details["loss"] == pytest.approx((4 * copied + blind) / 5, rel=1e-4) and row.n == 5


def test_the_moved_tokens_see_those_before_them(tokenizer):
    """A mask is given, and transformers' rule that a jump opens another document is out of force."""
    from transformers import masking_utils

    from pose_plugin.attention import restart_rule

    seen = []

    class Spy(Copier):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **rest):
            if position_ids is not None:
                rule = masking_utils.find_packed_sequence_indices
                seen.append((rule is restart_rule, attention_mask.tolist(), rule(position_ids)))
            return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **rest)

    before = masking_utils.find_packed_sequence_indices
    gap_probe(Spy(30), tokenizer, [repeated(30, 3)], [200], tokens=40, max_windows=1, **QUIET)
    assert seen == [(True, [[1] * 40], None)] * 2
    assert masking_utils.find_packed_sequence_indices is before


def test_gap_pieces_and_their_number(make_llama, tokenizer):
    text = torch.randint(0, 400, (500,), generator=torch.Generator().manual_seed(3)).tolist()
    results = [
        gap_probe(
            make_llama(), tokenizer, [text, text[:30]], [200], tokens=50, max_windows=n, batch_size=batch, **QUIET
        )
        for n, batch in ((4, 3), (99, 1))
    ]
    four, ten = (result.by_length() for result in results)
    for probe in ten.values():
        assert len(probe.samples) == 10 and len({round(loss, 3) for loss in probe.samples}) == 10
        assert sum(probe.samples) / 10 == pytest.approx(probe.score) and probe.n == 10 * 20
    # Four of the ten, spread over the text.
    assert four[200].samples == pytest.approx([ten[200].samples[i] for i in (0, 2, 5, 7)], rel=1e-5)
    assert results[0].metrics() == {f"gap_loss/{n}": four[n].score for n in (50, 200)}
    assert list(gap_probe(make_llama(), tokenizer, [text], [300], **QUIET).by_length()) == [300]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, r"lengths=\[\]"),
        ({"lengths": [100], "tokens": 200}, "200 tokens"),
        ({"lengths": [100], "max_windows": 0}, "max_windows"),
        ({"lengths": [900]}, "tokens=640"),
    ],
)
def test_gap_bad_input(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        gap_probe(None, tokenizer, [repeated(30, 3)], **arguments, **QUIET)


def test_an_evaluator_that_runs_out_of_memory_says_so(tokenizer, monkeypatch):
    model = Copier(30)
    monkeypatch.setattr(model, "forward", full_when_long(model.forward))
    with pytest.raises(memory.TooLittleMemory, match="length=80"):
        asked(model, tokenizer, [repeated(30, 3)[:80]], 80, 16)


def full_when_long(forward):
    def full(input_ids=None, logits_to_keep=0, **rest):
        if input_ids.shape[1] > 40:
            raise torch.OutOfMemoryError("full")
        return forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **rest)

    return full


def test_the_begin_token_of_a_gap_piece_counts_in_its_tokens(tokenizers_by_name, make_llama, monkeypatch):
    tokenizer, model, seen = tokenizers_by_name["with BOS"], make_llama(900), []
    forward = model.forward

    def spy(input_ids=None, **rest):
        seen.extend(input_ids.tolist() if "position_ids" in rest else [])
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model, "forward", spy)
    text = repeated(30, 4)
    measure = Gap(texts=[text], tokens=40, **QUIET)
    measure.measure(model, tokenizer, [100])
    assert measure.work(100).sequences == 3
    begin = [tokenizer.bos_token_id]
    assert seen == 2 * [begin + text[at : at + 39] for at in (0, 39, 78)]
