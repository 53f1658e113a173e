"""Every rule of the settings, and the exact sentence a user reads when one is broken."""

from __future__ import annotations

import pytest

from pose_plugin.config import EvaluateSettings, PoSESettings, RopeSettings, parse_settings
from pose_plugin.utils.errors import PoSEError

KEYS = (
    "target_length, train_length, rope, sampler, chunks, variant, content, mask_seam, unskipped_ratio, "
    "target_margin, seed, self_test, evaluate"
)
ROPE_KEYS = (
    "type, factor, theta, original_length, beta_fast, beta_slow, attention_factor, low_freq_factor, "
    "high_freq_factor, factors_file"
)
EVALUATE_KEYS = (
    "every, at_start, at_end, tasks, lengths, texts, trials, max_windows, evaluator, short_context, short_length, "
    "batch_size, seed"
)
EVERY = "steps from one measurement to the next; default: none between"
CHUNKS = "N, the chunks of a window (samplers pose, clamped, turns)"
DESCRIPTION = RopeSettings.model_fields["type"].description
NAMES = "linear, ntk, base, yarn, yarn-revised, llama3, longrope, dynamic, auto, none"
KIND = f" ({DESCRIPTION})" if DESCRIPTION else ""
TARGET = "L_t, the wanted window in tokens"

# What is added to {"target_length": 1024}, and what is said about it. None removes a key.
REFUSED = [
    (
        {"target_length": None},
        f"pose.target_length is missing: {TARGET}. Add it, e.g. `target_length: 32768`",
    ),
    (
        {"train_length": 2048},
        "pose: target_length=1024 is smaller than the trained window train_length=2048; set target_length "
        "to the window you want, or shorten train_length (Axolotl: sequence_len)",
    ),
    ({"chunks": 0}, f"pose.chunks=0: input should be greater than or equal to 1 ({CHUNKS})"),
    ({"chunks": -3}, f"pose.chunks=-3: input should be greater than or equal to 1 ({CHUNKS})"),
    ({"target_length": 0}, f"pose.target_length=0: input should be greater than or equal to 1 ({TARGET})"),
    (
        {"target_length": 1024.0},
        f"pose.target_length=1024.0: input should be a valid integer; write 1024 ({TARGET})",
    ),
    ({"target_length": 10.5}, f"pose.target_length=10.5: input should be a valid integer ({TARGET})"),
    ({"target_length": "1024"}, f"pose.target_length='1024': input should be a valid integer ({TARGET})"),
    ({"target_length": True}, f"pose.target_length=True: input should be a valid integer ({TARGET})"),
    (
        {"self_test": "no"},
        "pose.self_test='no': input should be a valid boolean; write true or false, without quotes (prove on the first "
        "batch that the chunks see each other)",
    ),
    (
        {"mask_seam": 0},
        "pose.mask_seam=0: input should be a valid boolean; write true or false, without quotes (no loss on a token "
        "whose predecessor was skipped (content skip))",
    ),
    (
        {"evaluate": {"at_end": "no"}, "train_length": 64},
        "pose.evaluate.at_end='no': input should be a valid boolean; write true or false, without quotes (measure "
        "after the last step)",
    ),
    ({"target_length": float("inf")}, f"pose.target_length=inf: input should be a valid integer ({TARGET})"),
    ({"target_lenght": 5}, f"pose.target_lenght=5 is not a known key. Known keys: {KEYS}"),
    ({"rope": {"teta": 5.0}}, f"pose.rope.teta=5.0 is not a known key. Known keys: {ROPE_KEYS}"),
    ({"evaluate": {"evry": 5}}, f"pose.evaluate.evry=5 is not a known key. Known keys: {EVALUATE_KEYS}"),
    (
        {"evaluate": {"every": 0}},
        f"pose.evaluate.every=0: input should be greater than or equal to 1 ({EVERY})",
    ),
    (
        {"evaluate": {"tasks": "gap"}, "train_length": 64},
        "pose: evaluate.tasks=gap needs evaluate.texts, files with text to measure on",
    ),
    (
        {"evaluate": {"tasks": ["passkey", "longppl"]}, "train_length": 64},
        "pose: evaluate.tasks=longppl needs evaluate.texts, files with text to measure on",
    ),
    (
        {"evaluate": {"tasks": "short", "every": 5}, "train_length": 64},
        "pose: evaluate.tasks=short needs evaluate.texts, files with text to measure on",
    ),
    (
        {"evaluate": {"tasks": "longppl", "texts": "book.txt"}, "train_length": 64},
        "pose: evaluate.tasks=longppl needs evaluate.evaluator, a long-context model with the same tokenizer, which "
        "says before the first step which tokens need far text",
    ),
    (
        {"evaluate": {"tasks": "short", "texts": "book.txt", "evaluator": "m"}, "train_length": 64},
        "pose: evaluate.evaluator=m has no effect without longppl in evaluate.tasks",
    ),
    (
        {"evaluate": {"at_end": False}, "train_length": 64},
        "pose: evaluate never measures: set every, at_start or at_end, or remove the block",
    ),
    ({"evaluate": {"lengths": []}}, "pose: evaluate.lengths is empty; name some, or remove the key for the default"),
    (
        {"evaluate": {}},
        "pose: evaluate.lengths is missing, and without train_length its default is not known; name lengths in "
        "tokens, e.g. lengths: [256, 1024]",
    ),
    ({"rope": "yarnn"}, f"pose: rope.type=yarnn is unknown; use {NAMES}"),
    ({"rope": {"type": 3}}, f"pose.rope.type=3: input should be a valid string{KIND}"),
    (
        {"rope": "base"},
        "pose: rope.type=base needs rope.theta, the new base, e.g. {type: base, theta: 2.0e8}",
    ),
    (
        {"rope": {"type": "yarn", "theta": 1e6}},
        "pose: rope.theta=1000000.0 has no effect with rope.type=yarn; remove it, or set rope.type to base",
    ),
    (
        {"rope": "longrope"},
        "pose: rope.type=longrope needs rope.factors_file, a JSON with long_factor and short_factor",
    ),
    (
        {"rope": {"type": "linear", "factors_file": "f.json"}},
        "pose: rope.factors_file=f.json has no effect with rope.type=linear; remove it, or set rope.type to longrope",
    ),
    (
        {"rope": {"type": "linear", "factor": 0.5}},
        "pose.rope.factor=0.5: input should be greater than or equal to 1 (s, the stretch; default "
        "target_length / original_length)",
    ),
    (
        {"sampler": "posse"},
        "pose.sampler='posse': input should be 'pose', 'clamped', 'randpos', 'cream', 'turns', 'sentences' or 'none' "
        "(where the chunks of a window are put)",
    ),
    (
        {"content": "skip"},
        "pose: content=skip takes a window out of a longer document and needs train_length, the window's tokens",
    ),
    (
        {"content": "aligned"},
        "pose: content=aligned takes a window out of a longer document and needs train_length, the window's tokens",
    ),
    (
        {"content": "aligned", "sampler": "randpos", "train_length": 64},
        "pose: content=aligned fills several chunks and has no effect with sampler=randpos, chunks=2; write content: "
        "window, which takes one piece from anywhere in the document",
    ),
    (
        {"content": "aligned", "sampler": "none", "train_length": 64},
        "pose: content=aligned fills several chunks and has no effect with sampler=none, chunks=2; write content: "
        "window, which takes one piece from anywhere in the document",
    ),
    (
        {"sampler": "none", "chunks": 3},
        "pose: chunks=3 has no effect with sampler=none; remove it, or write sampler: pose",
    ),
    ({"rope": 5}, f"pose: rope=5 is neither a name ({NAMES}) nor a block such as {{type: base, theta: 2.0e8}}"),
    (
        {"target_length": 10**12},
        f"pose.target_length={10**12}: input should be less than or equal to 2147483647 ({TARGET})",
    ),
    (
        {"rope": {"type": "base", "theta": float("inf")}},
        "pose.rope.theta=inf: input should be a finite number (the new RoPE base, for `type: base` (required there))",
    ),
    (
        {"unskipped_ratio": 1.5},
        "pose.unskipped_ratio=1.5: input should be less than or equal to 1 (share of rows left plain)",
    ),
    (
        {"target_margin": -1},
        "pose.target_margin=-1: input should be greater than or equal to 0 (sample up to target_length + "
        "margin, since the last L_c distances are rarest)",
    ),
    (
        {"seed": "a"},
        "pose.seed='a': input should be a valid integer (positions are a function of (seed, epoch, the "
        "document's tokens))",
    ),
]


def values(changes):
    return {key: value for key, value in {"target_length": 1024, **changes}.items() if value is not None}


@pytest.mark.parametrize("changes, sentence", REFUSED, ids=lambda case: str(case)[:40])
def test_refused_with_a_sentence(changes, sentence):
    with pytest.raises(PoSEError) as caught:
        parse_settings(values(changes))
    assert str(caught.value) == sentence


def test_several_faults_are_told_together_one_a_line():
    with pytest.raises(PoSEError) as caught:
        parse_settings({"chunks": 0, "colour": "red"}, where="PoSECollator")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("PoSECollator.target_length is missing")
    assert lines[1].startswith("PoSECollator.chunks=0")
    assert lines[2].startswith("PoSECollator.colour='red' is not a known key")


@pytest.mark.parametrize("block", [None, True, 32768, [32768]])
def test_a_block_that_is_no_mapping(block):
    with pytest.raises(PoSEError) as caught:
        parse_settings(block)
    assert str(caught.value) == f"`pose:` is {block!r}, but must be a block with at least target_length"


@pytest.mark.parametrize(
    "changes, field, expected",
    [
        ({}, "train_length", None),
        ({}, "chunks", 2),
        ({}, "content", "contiguous"),
        ({}, "sampler", "pose"),
        ({}, "mask_seam", True),
        ({}, "rope", RopeSettings(type="yarn")),
        ({"rope": "linear"}, "rope", RopeSettings(type="linear")),
        ({"rope": {"type": "base", "theta": 2e8}}, "rope", RopeSettings(type="base", theta=2e8)),
        ({"train_length": 1024}, "train_length", 1024),
        ({"train_length": 64, "content": "skip"}, "content", "skip"),
        ({"seed": -1}, "seed", -1),
        ({"target_margin": 0}, "target_margin", 0),
    ],
    ids=str,
)
def test_accepted(changes, field, expected):
    assert getattr(parse_settings(values(changes)), field) == expected


def test_settings_pass_through_and_cannot_be_changed():
    settings = parse_settings({"target_length": 64})
    assert parse_settings(settings) is settings
    with pytest.raises(ValueError, match="frozen"):
        settings.target_length = 5


@pytest.mark.parametrize(
    "model",
    [
        PoSESettings,
        RopeSettings,
        EvaluateSettings,
    ],
)
def test_every_field_is_described(model):
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_settings_survive_json():
    settings = parse_settings({"target_length": 64, "rope": {"type": "base", "theta": 2e8}})
    assert parse_settings(settings.model_dump(mode="json")) == settings
