"""Losses, gradients, checkpointing, training ratios, and which batches are accepted."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pose_plugin.beacon import (
    BeaconCache,
    beacon_gradient_norm,
    check_beacon_gradients,
    find_tuner,
    interval_count,
    set_ratio_step,
)
from pose_plugin.beacon.cache import IntervalView
from pose_plugin.beacon.layout import Scheme, lay_out
from pose_plugin.beacon.trainer import BeaconCallback, _group, lengths_of, require_trainable
from pose_plugin.utils.errors import PoSEError
from tests.models import make_base, make_beacon, make_ids


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def test_loss_is_the_token_mean_over_all_intervals():
    """Each token but the first is predicted, also across the border of two intervals."""
    ids = make_ids(26, rows=2)
    labels = ids.clone()
    labels[0, 5:12] = -100
    model = make_beacon().train()
    output = model(ids, labels=labels, ratio=4)
    logits = output.logits[:, :-1].reshape(-1, 64)
    expected = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    border = torch.full_like(ids, -100)
    border[:, 8] = ids[:, 8]  # the first token of the second interval, and nothing else
    assert model(ids, labels=border, ratio=4).loss.item() == pytest.approx(
        nn.functional.cross_entropy(output.logits[:, 7], ids[:, 8]).item(), rel=1e-5
    )


def test_loss_over_the_items_of_the_step():
    ids = make_ids(20)
    model = make_beacon().train()
    mean = model(ids, labels=ids, ratio=4).loss
    summed = model(ids, labels=ids, ratio=4, num_items_in_batch=torch.tensor(38)).loss
    assert summed.item() == pytest.approx(mean.item() / 2, rel=1e-6)
    shifted = torch.cat([ids[:, 1:], torch.tensor([[-100]])], dim=1)
    assert model(ids, shift_labels=shifted, ratio=4).loss.item() == pytest.approx(mean.item(), rel=1e-6)
    kept = model(ids, labels=ids, ratio=4, logits_to_keep=3)
    assert kept.logits.shape == (1, 3, 64)
    assert kept.loss.item() == pytest.approx(mean.item(), rel=1e-6)


def test_gradients_reach_every_beacon_parameter_and_nothing_else():
    """Of the last layer, only keys and values are read by what follows: its q and o get exactly zero."""
    model = make_beacon().train()
    ids = make_ids(30)
    model(ids, labels=ids, ratio=4).loss.backward()
    found = gradients(model)
    assert len(found) == 9
    zero = {name for name, gradient in found.items() if not gradient.any()}
    last = "base_model.model.model.layers.1.self_attn."
    assert zero == {f"{last}{name}_proj.beacon_proj.default.weight" for name in "qo"}
    assert all(p.grad is None for name, p in model.named_parameters() if "beacon_" not in name)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj", "q_proj"])
def test_gradient_is_the_slope(projection):
    """Finite differences through the whole stream, memory and moved keys included."""
    model = make_beacon(attention="eager").train()
    ids = make_ids(26)
    model(ids, labels=ids, ratio=4).loss.backward()
    attention = model.base_model.model.model.layers[0].self_attn
    parameter = getattr(attention, projection).beacon_proj["default"].weight
    at = divmod(int(parameter.grad.abs().argmax()), 32)
    with torch.no_grad():
        values = []
        for step in (0.01, -0.02):
            parameter[at] += step
            values.append(model(ids, labels=ids, ratio=4).loss.item())
    assert (values[0] - values[1]) / 0.02 == pytest.approx(parameter.grad[at].item(), rel=0.02)


def test_memory_without_gradient():
    """Only the last interval's loss: with n = 1 it reaches older beacons only through those of the interval before."""
    ids = make_ids(32)
    labels = torch.full_like(ids, -100)
    labels[:, 25:] = ids[:, 25:]
    losses, norms = [], []
    for reach in (None, 3, 1):
        model = make_beacon(gradient_intervals=reach).train()
        loss = model(ids, labels=labels, ratio=4).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(beacon_gradient_norm(model))
    assert losses[0] == losses[1] == losses[2]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[2] != pytest.approx(norms[0], rel=1e-3)
    assert norms[2] > 0


def test_only_the_last_pieces_of_memory_keep_their_gradient():
    """Of three, with n = 2: keys and values of the first have none."""
    cache = BeaconCache()
    cache.pieces = [[(torch.ones(1, 1, 2, 4, requires_grad=True), torch.ones(1, 1, 2, 4, requires_grad=True))]] * 3
    for keep, expected in ((None, [True] * 3), (2, [False, True, True]), (1, [False, False, True]), (5, [True] * 3)):
        (past,) = cache.view(lay_out(6, (), 2, Scheme(4)), keep).past
        assert [keys.requires_grad for keys, _ in past] == [values.requires_grad for _, values in past] == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", [{}, {"layout": "v2"}, {"rank": 2}], ids=str)
def test_checkpointing_changes_nothing(attention, changes):
    """Loss and every gradient, bit for bit."""
    ids = make_ids(30, rows=2)
    results = []
    for enabled in (False, True):
        model = make_beacon(attention=attention, **changes).train()
        calls: list[int] = []

        def counted(function, *args, use_reentrant, calls=calls):
            calls.append(1)
            return checkpoint(function, *args, use_reentrant=use_reentrant)

        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.base_model.model.model.layers:
                layer._gradient_checkpointing_func = functools.partial(counted, use_reentrant=False)
        loss = model(ids, labels=ids, ratio=4).loss
        loss.backward()
        results.append((loss, gradients(model)))
        assert len(calls) == (8 if enabled else 0)  # four intervals of two layers were really checkpointed
    (plain, expected), (checkpointed, found) = results
    assert torch.equal(plain, checkpointed)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_reentrant_checkpointing_is_refused():
    ids = make_ids(30)
    model = make_beacon().train()
    for kwargs in ({"use_reentrant": True}, {}):
        for layer in model.base_model.model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, **kwargs)
        with pytest.raises(PoSEError, match="use_reentrant=True"):
            model(ids, labels=ids)
    model.eval()(ids)  # nothing to refuse there


def test_first_step_check():
    ids = make_ids(30)
    model = make_beacon().train()
    set_ratio_step(model, 0)
    model(ids[:, :8], labels=ids[:, :8]).loss.backward()
    assert check_beacon_gradients(model) is None  # nothing was condensed yet
    model(ids, labels=ids).loss.backward()
    norm = check_beacon_gradients(model)
    assert norm == pytest.approx(beacon_gradient_norm(model))
    assert norm > 0
    assert check_beacon_gradients(model, gradient=lambda p: torch.ones_like(p)) == pytest.approx(
        math.sqrt(sum(p.numel() for p in model.parameters() if p.requires_grad))
    )
    model.zero_grad()
    with pytest.raises(PoSEError, match=r"gradient norm is 0.0 after a step with 21 labels behind a beacon"):
        check_beacon_gradients(model)


@pytest.mark.parametrize("changes", [{}, {"rank": 2}, {"layout": "v2"}], ids=str)
def test_texts_within_one_interval_touch_every_parameter(changes):
    """DDP waits for a gradient of each parameter; they are zero."""
    ids = make_ids(1 if changes.get("layout") else 8)
    model = make_beacon(**changes).train()
    loss = model(ids, labels=ids).loss if ids.shape[1] > 1 else model(ids, shift_labels=ids).loss
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None and not p.grad.any() for p in trained)
    with torch.no_grad():
        base = make_base()(ids).logits
    assert loss.item() == pytest.approx(
        nn.functional.cross_entropy(base[0, :-1], ids[0, 1:]).item()
        if ids.shape[1] > 1
        else nn.functional.cross_entropy(base[0], ids[0]).item(),
        rel=1e-5,
    )


def ratios_of(model, tokens: int) -> list[int]:
    cache = BeaconCache()
    model(make_ids(tokens), past_key_values=cache)
    return cache.ratios


def test_training_ratios_follow_step_and_sample():
    """Two ranks draw alike, a resumed run draws what the first would have drawn, and evaluation draws nothing."""
    model, rank1 = make_beacon().train(), make_beacon().train()
    state = torch.random.get_rng_state()
    drawn = []
    for step in range(6):
        set_ratio_step(model, step)
        set_ratio_step(rank1, step)
        drawn.append([ratios_of(model, 60), ratios_of(model, 60)])
        assert drawn[-1] == [ratios_of(rank1, 60), ratios_of(rank1, 60)]
    assert len({tuple(sample) for step in drawn for sample in step}) >= 10
    assert {ratio for step in drawn for sample in step for ratio in sample} == {2, 4, 8}
    resumed = make_beacon().train()
    set_ratio_step(resumed, 4)
    assert [ratios_of(resumed, 60), ratios_of(resumed, 60)] == drawn[4]
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():  # a sample that a trainer generates between two steps
        assert ratios_of(resumed, 60) == [4] * 7
    resumed.eval()
    assert ratios_of(resumed, 60) == [4] * 7
    # A loop that never sets its step still draws new ratios each time.
    own = make_beacon().train()
    assert len({tuple(ratios_of(own, 60)) for _ in range(6)}) > 3
    other = make_beacon(seed=1).train()
    set_ratio_step(other, 0)
    assert [ratios_of(other, 60), ratios_of(other, 60)] != drawn[0]


def test_training_policies():
    assert len(set(ratios_of(make_beacon(train_ratio="instance").train(), 60))) == 1
    assert ratios_of(make_beacon(train_ratio=2).train(), 60) == [2] * 7
    with pytest.raises(PoSEError, match="training text too long: 20 intervals"):
        ratios_of(make_beacon(window=24).train(), 161)


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_columns_that_only_pad_are_not_condensed(layout):
    """Rows padded to a fixed length: a step of short texts trains no beacon, which must not stop the run."""
    model, ids = make_beacon(layout=layout, overlap=3, train_ratio=4).train(), make_ids(40, rows=2)
    for end, condensed in ((7, 0), (20, 2)):
        mask, labels = torch.ones_like(ids), ids.clone()
        mask[:, end:], labels[:, end:] = 0, -100
        model.base_model.set_step(0)
        padded = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
        assert model.base_model.condensed_since_step == condensed
        alone = model(ids[:, :end], labels=ids[:, :end])
        assert padded.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)  # a sum over more zeros
        assert torch.equal(padded.logits[:, :end], alone.logits)
        assert padded.logits.shape[1] == padded.hidden_states[0].shape[1] == 40
    labels[0, 35] = 5  # a loss on padding, if somebody wants it
    model.base_model.set_step(0)
    assert model(ids, attention_mask=mask, labels=labels).loss != alone.loss
    assert model.base_model.condensed_since_step == 4


def test_padding_on_the_right():
    """In a padded batch, each row's loss is what it is alone; no cache is returned."""
    ids = make_ids(22, rows=2)
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    model = make_beacon().train()
    both = model(ids, attention_mask=mask, labels=labels, ratio=4)
    alone = [model(ids[:1], labels=ids[:1], ratio=4).loss, model(ids[1:, :13], labels=ids[1:, :13], ratio=4).loss]
    expected = (alone[0] * 21 + alone[1] * 12) / 33
    assert both.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    evaluated = model.eval()(ids, attention_mask=mask, labels=labels)
    assert evaluated.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(value is None for key, value in evaluated.items() if "cache" in key or "past" in key)


REFUSED = [
    ({"attention_mask": torch.tensor([[0, 0] + [1] * 18])}, "padding before or between the tokens"),
    ({"attention_mask": torch.tensor([[1] * 9 + [0] + [1] * 10])}, "padding before or between the tokens"),
    ({"attention_mask": torch.tensor([[1] * 18 + [0] * 2]), "use_cache": True}, "padding on the right"),
    ({"attention_mask": torch.ones(1, 1, 20, 20)}, r"attention_mask: .* not \(1, 1, 20, 20\)"),
    ({"position_ids": torch.tensor([[*range(11), *range(9)]])}, "position_ids: they are not 0…19"),
    ({"position_ids": torch.arange(20)[None] + 100}, "position_ids: they are not 0…19"),
    ({"position_ids": torch.arange(20).expand(3, 1, 20)}, "position_ids: they are not 0…19"),
    ({"seq_idx": torch.zeros(1, 20)}, r"seq_idx: Beacon cannot cut this input of shape \(1, 20\)"),
    ({"output_attentions": True}, "output_attentions: "),
    ({"inputs_embeds": torch.zeros(1, 20, 32)}, "give either input_ids or inputs_embeds"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused_inputs(changes, message):
    with pytest.raises(PoSEError, match=message):
        make_beacon()(make_ids(20), **changes)


def test_harmless_masks_and_positions_pass():
    model = make_beacon()
    ids = make_ids(20)
    with torch.no_grad():
        expected = model(ids).logits
        given = {"attention_mask": torch.ones(1, 20), "position_ids": torch.arange(20)[None]}
        assert torch.equal(model(ids, **given).logits, expected)


@pytest.mark.parametrize("tokens", [8, 26])
def test_figures_for_trainers(tokens):
    """A fused head's per-token figures and TRL's sums, against the logits; the loss and its gradient are the same."""
    ids = make_ids(tokens, rows=2)
    labels = ids.clone()
    labels[0, 3:6] = -100
    model = make_beacon().train()
    plain = model(ids, labels=labels, ratio=4)
    plain.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    log_p = plain.logits[:, :-1].log_softmax(-1)
    mask = labels[:, 1:] != -100
    entropy = -(log_p.exp() * log_p).sum(-1)

    figures = model(ids, labels=labels, ratio=4, fused_lm_head=True)
    assert torch.equal(figures.label_mask, mask)
    picked = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    assert torch.allclose(figures.log_probs, picked * mask, atol=1e-6)
    assert torch.allclose(figures.entropy, entropy * mask, atol=1e-5)
    assert torch.equal(figures.is_top1.bool(), (log_p.argmax(-1) == labels[:, 1:]) & mask)
    assert figures.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    over = model(ids, labels=labels, ratio=4, fused_lm_head=True, num_items_in_batch=2 * mask.sum())
    assert over.loss.item() == pytest.approx(plain.loss.item() / 2, rel=1e-6)
    (-figures.log_probs.sum() / mask.sum()).backward()
    assert expected.keys() == gradients(model).keys()
    assert all(torch.allclose(g, expected[name], atol=1e-6) for name, g in gradients(model).items())
    shifted = model(ids, shift_labels=labels, ratio=4, fused_lm_head=True)
    assert shifted.log_probs.shape == ids.shape

    find_tuner(model).report_statistics = True
    counted = model(ids, labels=labels, ratio=4)
    assert counted.num_valid_tokens.item() == mask.sum().item()
    assert counted.num_correct_tokens.item() == figures.is_top1.sum().item()
    assert counted.entropy_sum.item() == pytest.approx((entropy * mask).sum().item(), rel=1e-5)
    assert counted.loss.item() == plain.loss.item()


def trainer_for_two(stage: int, padding: int | None):
    """The parts of a trainer on two ranks that grouping reads."""
    return SimpleNamespace(
        args=SimpleNamespace(world_size=2, per_device_train_batch_size=1, data_seed=None, seed=0, max_length=None),
        train_dataset=[{"input_ids": [0] * tokens} for tokens in range(1, 400, 3)],
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))),
        data_collator=SimpleNamespace(pad_to_multiple_of=padding),
    )


def judged(fp16: bool, scales: list[float]) -> list[bool]:
    """Say after each step, with its loss scale, whether the callback has judged the gradient."""
    model, callback, found = make_beacon().train(), BeaconCallback(), []
    args, state = SimpleNamespace(fp16=fp16), SimpleNamespace(global_step=0, is_world_process_zero=True)
    for scale in scales:
        callback.on_step_begin(args, state, None, model=model)
        (model(make_ids(20), labels=make_ids(20), ratio=4).loss * scale).backward()
        callback.on_step_end(args, state, None, model=model)
        found.append(callback._judged)
    callback.on_train_end(args, state, None)
    return found


def test_an_overflow_of_the_loss_scale_is_not_judged(monkeypatch):
    """The scaler skips such a step, and halves the scale."""
    monkeypatch.setattr("pose_plugin.beacon.trainer._MOST_OVERFLOWS", 2)
    over = math.inf
    assert judged(True, [over, over, 1.0, over]) == [False, False, True, True]
    for fp16, scales in ((False, [over]), (True, [over] * 3), (True, [over, 0.0])):
        with pytest.raises(PoSEError, match=r"the beacons' gradient norm is (nan|0|inf)"):
            judged(fp16, scales)


# The first label that a beacon gives its gradient for: that of the token behind the first token which sees a beacon.
@pytest.mark.parametrize(("layout", "first"), [("v1", 9), ("v2", 5)])
def test_a_step_whose_labels_reach_no_beacon_is_not_judged(layout, first, caplog):
    """A long prompt and an answer behind it in most texts, but not in the first ones."""
    model, callback, ids = make_beacon(layout=layout).train(), BeaconCallback(), make_ids(30)
    args, state = SimpleNamespace(fp16=False), SimpleNamespace(global_step=0, is_world_process_zero=True)

    def judged(label: int, scale: float = 1.0) -> bool:
        labels = torch.full_like(ids, -100)
        labels[:, label] = ids[:, label]
        state.global_step += 1
        callback.on_step_begin(args, state, None, model=model)
        model.zero_grad()
        (model(ids, labels=labels, ratio=4).loss * scale).backward()
        callback.on_step_end(args, state, None, model=model)
        return callback._judged

    warning = "step 1 trained no beacon: all labels were before the first beacon"
    assert not judged(first - 1) and not judged(1) and caplog.text.count(warning) == 1
    callback.on_train_end(args, state, None)
    assert "no beacon was trained: all labels were before the first beacon" in caplog.text
    with pytest.raises(PoSEError, match=r"gradient norm is 0.0 after a step with 1 labels behind a beacon"):
        judged(first, scale=0.0)
    assert judged(first)


def test_a_loss_of_the_users_own_is_judged():
    """Which labels it has is not known."""
    model = make_beacon().train()
    model(make_ids(8))
    assert check_beacon_gradients(model) is None
    model(make_ids(9)).logits[:, -1].sum().backward()
    assert check_beacon_gradients(model) > 0


def grouped(trainer, interval: int):
    return _group(trainer, interval, None, lengths_of(trainer.train_dataset))


@pytest.mark.parametrize(("interval", "padding"), [(96, None), (128, 64), (32, 64), (96, 1), (96, 384)])
def test_padded_ranks_read_the_same_number_of_intervals(interval, padding):
    trainer = trainer_for_two(3, padding)
    order = list(grouped(trainer, interval))
    multiple = padding or 1
    padded = [-(-len(trainer.train_dataset[at]["input_ids"]) // multiple) * multiple for at in order]
    counts = [interval_count(tokens, interval) for tokens in padded]
    assert counts[::2] == counts[1::2] and len(set(counts)) > 1


def test_padding_that_changes_interval_counts_is_refused_under_zero3():
    """100 tokens are padded to 128 and 190 to 192, both two intervals of 96; but 200 to 256 and 280 to 320, three and
    four."""
    with pytest.raises(PoSEError, match="interval=96: rows are padded to a multiple of 64 tokens"):
        grouped(trainer_for_two(3, 64), 96)
    assert grouped(trainer_for_two(2, 64), 96) is not None  # ranks do not wait for each other within a step


def test_a_data_seed_of_zero_is_a_seed():
    trainer = trainer_for_two(2, None)
    trainer.args.data_seed, trainer.args.seed = 0, 5
    assert list(grouped(trainer, 96)) == list(grouped(trainer_for_two(2, None), 96))


def test_rows_that_were_packed_before_are_refused():
    """The trainer drops the lengths of their texts, which would be condensed into one another."""
    trainer = SimpleNamespace(args=SimpleNamespace(), accelerator=SimpleNamespace(), is_fsdp_enabled=False)
    trainer.train_dataset = [{"input_ids": [1, 2, 3]}]
    require_trainable(trainer)
    trainer.train_dataset = [{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}]
    with pytest.raises(PoSEError, match="train_dataset has the column seq_lengths"):
        require_trainable(trainer)


def test_writing_again_changes_nothing():
    """What checkpointing does in the backward pass: the view gives the same keys and keeps nothing new."""
    keys = torch.randn(1, 1, 2, 4)
    past = torch.randn(1, 1, 3, 4)
    view = IntervalView(lay_out(3, (), 2, Scheme(4)), [[(past, past)]])
    first = view.update(keys, keys, 0)
    assert torch.equal(first[0], torch.cat([past, keys], dim=2))
    written = view.seal()
    assert torch.equal(written[0][0], keys)
    assert torch.equal(view.update(keys, keys, 0)[0], first[0])
    assert view.written == {}
    assert (view.get_seq_length(), view.get_mask_sizes(2, 0)) == (3, (5, 0))
