"""Every rule of the settings, and what the error names if one is broken."""

from __future__ import annotations

import pytest

from pose_plugin.config import PoSESettings, RopeSettings, parse_settings
from pose_plugin.positions import SAMPLERS
from pose_plugin.utils.errors import PoSEError

# What is added to {"target_length": 1024}, and what the error must name: key=value, the limit or the fix. None removes
# a key.
REFUSED = [
    ({"target_length": None}, "pose.target_length is missing", "target_length: 32768"),
    ({"train_length": 2048}, "target_length=1024", "train_length=2048", "sequence_len"),
    ({"chunks": 0}, "pose.chunks=0", "greater than or equal to 1", PoSESettings.model_fields["chunks"].description),
    ({"target_length": 1024.0}, "pose.target_length=1024.0", "write 1024"),
    ({"target_length": True}, "pose.target_length=True"),
    ({"target_length": 10**12}, f"pose.target_length={10**12}", "2147483647"),
    ({"self_test": "no"}, "pose.self_test='no'", "write true or false, without quotes"),
    ({"target_lenght": 5}, "pose.target_lenght=5", "target_length?", ", ".join(PoSESettings.model_fields)),
    ({"Sampler": "pose"}, "pose.Sampler='pose'", "did you mean sampler?"),
    ({"theta": 5e5}, "pose.theta=500000.0", "did you mean rope.theta?"),
    ({"seed": 2**63}, f"pose.seed={2**63}", f"{2**63 - 1}"),
    ({"target_margin": 2**62}, f"pose.target_margin={2**62}", "2147483647"),
    ({"target_margin": 2**31 - 1024}, "target_length=1024", f"target_margin={2**31 - 1024}", "2147483647"),
    ({"sampler": "posse"}, "pose.sampler='posse'", ", ".join(SAMPLERS), "did you mean pose?"),
    ({"sampler": "none", "chunks": 3}, "chunks=3", "sampler=none", "pose, clamped, turns"),
    ({"sampler": "turns", "variant": "reference"}, "variant=reference", "sampler=turns", "pose, clamped"),
    ({"content": "skip"}, "content=skip", "train_length"),
    ({"content": "aligned"}, "content=aligned", "train_length"),
    *(
        ({"content": content, "sampler": sampler, "train_length": 64}, f"content={content}", f"sampler={sampler}", fix)
        for content in ("skip", "aligned")
        for sampler, fix in (
            ("none", "content: window"),
            ("randpos", "content: window"),
            ("sentences", "content: window"),
            ("turns", "content: contiguous"),
        )
    ),
    ({"content": "window", "sampler": "turns", "train_length": 64}, "content=window", "content: contiguous"),
    ({"content": "skip", "chunks": 1, "train_length": 64}, "content=skip", "chunks=1", "content: window"),
    ({"rope": 5}, "rope=5", "yarn", "{type: base, theta: 2.0e8}"),
    ({"rope": "yarnn"}, "rope.type=yarnn", "yarn-revised", "did you mean yarn?"),
    ({"rope": {"teta": 5.0}}, "pose.rope.teta=5.0", "did you mean theta?", ", ".join(RopeSettings.model_fields)),
    ({"rope": "base"}, "rope.type=base", "rope.theta"),
    ({"rope": {"type": "yarn", "theta": 1e6}}, "rope.theta=1000000.0", "rope.type=yarn"),
    ({"rope": "longrope"}, "rope.type=longrope", "rope.factors_file"),
    ({"rope": {"type": "linear", "factors_file": "f.json"}}, "rope.factors_file", "rope.type=linear"),
    ({"evaluate": 5}, "pose.evaluate=5"),
]


def values(changes):
    return {key: value for key, value in {"target_length": 1024, **changes}.items() if value is not None}


@pytest.mark.parametrize("changes, named", [(changes, named) for changes, *named in REFUSED], ids=str)
def test_refused_by_key_and_value(changes, named):
    with pytest.raises(PoSEError) as caught:
        parse_settings(values(changes))
    assert [words for words in named if words not in str(caught.value)] == []


def test_several_faults_are_reported_together_one_per_line():
    with pytest.raises(PoSEError) as caught:
        parse_settings({"chunks": 0, "colour": "red"}, where="PoSECollator")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("PoSECollator.target_length is missing")
    assert lines[1].startswith("PoSECollator.chunks=0")
    assert lines[2].startswith("PoSECollator.colour='red' is not a known key")


@pytest.mark.parametrize("block", [None, True, 32768, [32768]])
def test_a_block_that_is_not_a_mapping(block):
    with pytest.raises(PoSEError) as caught:
        parse_settings(block)
    assert repr(block) in str(caught.value) and "target_length" in str(caught.value)


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
        ({"target_margin": 2**31 - 1025}, "target_margin", 2**31 - 1025),
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


@pytest.mark.parametrize("model", [PoSESettings, RopeSettings])
def test_every_field_is_described(model):
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def numbers(schema):
    """Yield the parts of a JSON schema that describe a number."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield schema
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from numbers(part)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("model", [PoSESettings, RopeSettings])
def test_no_number_takes_a_switch(model, switch):
    """YAML reads `yes` as true, which would pass as 1."""
    names = [name for name, field in model.model_json_schema()["properties"].items() if any(numbers(field))]
    assert len(names) >= 6
    for name in names:
        given = {name: switch} if model is PoSESettings else {"rope": {name: switch}}
        with pytest.raises(PoSEError, match=rf"\b{name}={switch}: input should be a valid "):
            parse_settings({"target_length": 1024, **given})


def test_a_number_that_yaml_reads_as_text():
    assert parse_settings({"target_length": 64, "rope": {"type": "base", "theta": "2e8"}}).rope.theta == 2e8


@pytest.mark.parametrize("model", [PoSESettings, RopeSettings])
def test_every_number_has_both_limits(model):
    for name, field in model.model_json_schema()["properties"].items():
        for number in numbers(field):
            lower, upper = {"minimum", "exclusiveMinimum"} & set(number), {"maximum", "exclusiveMaximum"} & set(number)
            assert lower and upper, (name, number)


def test_settings_survive_json():
    settings = parse_settings({"target_length": 64, "rope": {"type": "base", "theta": 2e8}})
    assert parse_settings(settings.model_dump(mode="json")) == settings
