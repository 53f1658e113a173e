"""What each inference engine takes from a saved folder: its window, and its frequencies.

One row of `RULES` per engine and range of versions. A row holds only data, as read in the engine's source; `taken`
applies it to a folder. `benchmarks/engine_facts.py` reads the facts again from wheels of the engines, and
`tests/export/test_engines.py` compares the rows with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pose_plugin.checkpoints.saved import NEED_ORIGINAL, Saved
from pose_plugin.rope.kinds import (
    YARN_BETAS,
    Frequencies,
    inverse_frequencies,
    longrope_attention_factor,
    yarn_attention_factor,
)
from pose_plugin.utils.errors import PoSEError

_ALL = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"})
NEED_FACTOR = frozenset({"linear", "dynamic", "yarn", "llama3"})
_MSCALE = frozenset({"mscale", "mscale_all_dim"})
_YARN = _MSCALE | {"beta_fast", "beta_slow", "truncate", "attention_factor"}

# Model types whose mscale an engine reads with separate code; llama.cpp in conversion/mistral3.py.
_READ_APART = {"llama.cpp": ("ministral3",)}
# What engines compute with that do not read these keys.
_USUAL_YARN = {**YARN_BETAS, "truncate": True}


class EngineStopsError(PoSEError):
    """An engine cannot load a folder.

    Attributes:
        reason: in a few words, without the engine's name and the fix.
    """

    def __init__(self, rule: Rule, reason: str, fix: str = "") -> None:
        super().__init__(f"{rule.engine} {rule.versions} stops: {reason}{fix}")
        self.reason = reason


@dataclass(frozen=True)
class Rule:
    """How one engine reads a model.

    Attributes:
        engine: its name, as in `pose-plugin export --engine`.
        versions: for which it holds, e.g. "< 0.30".
        read_in: the versions in whose source it was read, or the commit.
        older: whether it reads only `rope_theta` and `rope_scaling`, the keys of transformers 4.
        length_keys: keys of config.json that hold the window.
        smallest: whether the smallest of them counts, instead of the first that exists.
        before_others: a key that counts instead of all of them if it exists, whether larger or smaller.
        multiplied: kinds of rope for which it multiplies that window by the factor.
        from_original: kinds for which it takes the original window × factor.
        tokenizer: whether the tokenizer's model_max_length also limits the window.
        longrope_default: whether it takes the original window of a longrope model unless told another.
        kinds: of rope that it computes; it raises an error at others, if they are not in `dropped`.
        dropped: kinds that it silently computes as plain RoPE.
        unstated: kinds for which it takes the window of the config as the original one, if that is not stated.
        yarn_keys: keys of yarn that it reads, in addition to the factor and the original window.
        own_longrope_scale: whether it computes the scale of longrope's cos and sin itself, without attention_factor.
        strict: whether it raises an error at a window that is written as 8192.0. vLLM and SGLang require transformers
            5, whose configs check types.
    """

    engine: str
    versions: str
    read_in: str
    older: bool = False
    length_keys: tuple[str, ...] = ("max_position_embeddings",)
    smallest: bool = False
    before_others: str | None = None
    multiplied: frozenset[str] = frozenset()
    from_original: frozenset[str] = frozenset()
    tokenizer: bool = False
    longrope_default: bool = False
    kinds: frozenset[str] = _ALL
    dropped: frozenset[str] = frozenset()
    unstated: frozenset[str] = frozenset()
    yarn_keys: frozenset[str] = _YARN
    own_longrope_scale: bool = False
    strict: bool = False


_VLLM_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_SGLANG_LENGTHS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)

# vllm/config/model.py (`_get_and_verify_max_len`), transformers_utils/model_arch_config_convertor.py, and
# model_executor/layers/rotary_embedding.
_VLLM = Rule(
    "vllm",
    "≥ 0.30",
    read_in="0.30.0, 0.31.0, 0.32.0, 0.33.0",
    length_keys=_VLLM_LENGTHS,
    smallest=True,
    before_others="model_max_length",
    multiplied=_ALL - {"longrope", "llama3", "yarn"},
    tokenizer=True,
    longrope_default=True,
    own_longrope_scale=True,
    strict=True,
)
RULES = (
    # modeling_rope_utils.py, and generation/utils.py for the window.
    Rule(
        "transformers",
        "≥ 5",
        read_in="5.16.1",
        unstated=frozenset(NEED_ORIGINAL),
        strict=True,
    ),
    Rule("transformers", "4", read_in="4.57.6", older=True, unstated=frozenset({"yarn"})),
    _VLLM,
    replace(
        _VLLM,
        versions="< 0.30",
        read_in="0.14.0, 0.20.0, 0.24.0, 0.28.0, 0.29.0",
        from_original=frozenset({"yarn"}),
        yarn_keys=frozenset({"beta_fast", "beta_slow", "truncate", "attn_factor"}),
        strict=False,
    ),
    # srt/utils/hf_transformers/common.py (`get_context_length`), srt/layers/rotary_embedding.
    Rule(
        "sglang",
        "0.5",
        read_in="0.5.23",
        length_keys=_SGLANG_LENGTHS,
        # For kinds that have an original window, the factor counts as 1.
        multiplied=frozenset({"linear", "dynamic", "proportional"}),
        yarn_keys=_YARN - {"attention_factor"} | {"attn_factor"},
        own_longrope_scale=True,
        strict=True,
    ),
    # conversion/base.py; its loader and the logits in benchmarks/results/engines.json.
    Rule(
        "llama.cpp",
        "2026",
        read_in="0c1e57098",
        length_keys=("max_position_embeddings", "n_ctx", "n_positions", "max_length", "max_sequence_length"),
        kinds=frozenset({"default", "linear", "yarn", "llama3", "longrope"}),
        yarn_keys=frozenset({"beta_fast", "beta_slow"}),
        strict=True,
    ),
    # mlx_lm/models/rope_utils.py. Most of its models read the older keys; there is no limit, and this is the window
    # for which the model was made.
    Rule(
        "mlx",
        "0.32",
        read_in="0.32.2",
        older=True,
        kinds=_ALL,
        yarn_keys=frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
        own_longrope_scale=True,
    ),
    # server/text_generation_server/layers/rotary.py: linear passes without effect; yarn's betas are 32 and 1; longrope
    # has the short list up to the original window and the long one beyond it, which no training had.
    Rule(
        "tgi",
        "3.3",
        read_in="3.3.7",
        older=True,
        kinds=_ALL - {"linear", "proportional", "longrope"},
        dropped=frozenset({"linear"}),
        yarn_keys=frozenset({"mscale", "mscale_all_dim"}),
    ),
)


@dataclass(frozen=True)
class Taken:
    """What an engine makes of a folder.

    Attributes:
        default: the window that it takes by itself, tokens.
        most: the largest window that it accepts, tokens.
        rope: the flat rope dict that it computes, with the scale of cos and sin as attention_factor where it has one.
        dropped: the kind of rope that it silently replaces by plain RoPE, or None.
    """

    default: int
    most: int
    rope: Mapping[str, Any]
    dropped: str | None = None

    def frequencies(self, dim: int, maximum: int) -> tuple[Frequencies, float]:
        """Return the inverse frequencies, [dim / 2], and the scale of cos and sin; see `inverse_frequencies`."""
        return inverse_frequencies(self.rope, dim, max_position_embeddings=maximum)


def rules_of(engine: str) -> list[Rule]:
    """Return the rules of an engine, the newest version first."""
    return [rule for rule in RULES if rule.engine == engine]


def require_kind(engine: str, saved: Saved) -> None:
    """Check that an engine computes a folder's kind of rope.

    Raises:
        PoSEError: it would compute plain RoPE instead, or stop, also for want of the original window.
    """
    for rule in rules_of(engine):
        if saved.kind in rule.kinds:
            if saved.kind not in rule.unstated:
                _require_original(rule, saved.rope)
            continue
        served = "silently serves it at the base's frequencies" if saved.kind in rule.dropped else "does not support it"
        known = ", ".join(sorted(rule.kinds & {"yarn", "llama3", "linear"}))
        raise PoSEError(
            f"{engine} {rule.versions} {served}: rope_type={saved.kind}. Train with one of {known}, or serve with "
            "vLLM, SGLang or transformers"
        )


def ignored_keys(engine: str, saved: Saved) -> list[str]:
    """Return a sentence for each key of yarn that changes the trained model and that an engine does not read."""
    if saved.kind != "yarn":
        return []
    notes = []
    if abs(saved.extra_attention - 1) > 1e-6:
        notes.append(
            f"{engine} computes YaRN's 0.1·ln s + 1 itself and ignores attention_factor="
            f"{saved.rope['attention_factor']:g}: its logits will differ from the trained model's"
        )
    if abs(saved.mscale_attention - 1) > 1e-6 and saved.model_type not in _READ_APART.get(engine, ()):
        notes += [
            f"{engine} {rule.versions} ignores mscale={saved.rope['mscale']:g} and scales cos and sin by 0.1·ln s + 1, "
            "so its logits will differ from the trained model's: serve it with transformers, vLLM or SGLang"
            for rule in rules_of(engine)
            if "mscale" not in rule.yarn_keys
        ]
    return notes + [
        f"{engine} {rule.versions} ignores {key}={saved.rope[key]} and computes with {usual}, so some pairs turn at "
        "another speed than in training: serve it with transformers, vLLM or SGLang"
        for rule in rules_of(engine)
        for key, usual in _USUAL_YARN.items()
        if key not in rule.yarn_keys and saved.rope.get(key) not in (None, usual)
    ]


def taken(rule: Rule, saved: Saved) -> Taken:
    """Return what an engine takes from a folder.

    Raises:
        EngineStopsError: the engine raises an error at this folder.
    """
    written = saved.text.get("max_position_embeddings")
    if rule.strict and isinstance(written, float):
        raise EngineStopsError(
            rule, f"max_position_embeddings={written} is not a whole number", f"; write {written:.0f}"
        )
    rope = dict(saved.older_rope if rule.older else saved.rope)
    kind = rope["rope_type"]
    if kind not in rule.kinds | rule.dropped:
        raise EngineStopsError(rule, f"rope_type={kind} is not supported")
    if kind in rule.unstated:
        rope.setdefault("original_max_position_embeddings", saved.maximum)
    _require_original(rule, rope)
    if kind in NEED_FACTOR and "factor" not in rope and not rope.get("alpha"):
        raise EngineStopsError(rule, "factor is missing", f"; rope_type={kind} needs it")
    default, most = _window(rule, saved, rope)
    if kind in rule.dropped:
        return Taken(default, most, {"rope_type": "default", "rope_theta": rope["rope_theta"]}, dropped=kind)
    factor = float(rope.get("factor") or 1.0)
    if kind == "yarn":
        # Every engine has separate code for DeepSeek's attention, which reads them.
        latent = _MSCALE if saved.text.get("qk_rope_head_dim") else frozenset()
        rope = {key: value for key, value in rope.items() if key not in _YARN - rule.yarn_keys - latent}
        if "attn_factor" in rule.yarn_keys and rope.get("attn_factor"):
            rope["attention_factor"] = rope["attn_factor"] * yarn_attention_factor(factor)
    if kind == "longrope" and rule.own_longrope_scale:
        original = int(rope["original_max_position_embeddings"])
        own = longrope_attention_factor(saved.maximum / original, original)
        rope["attention_factor"] = rope.get("long_mscale") or own
    return Taken(default, most, rope)


def _require_original(rule: Rule, rope: Mapping[str, Any]) -> None:
    if rope["rope_type"] in NEED_ORIGINAL and not rope.get("original_max_position_embeddings"):
        raise EngineStopsError(
            rule,
            "original_max_position_embeddings is missing",
            f"; rope_type={rope['rope_type']} needs the window before training: pose-plugin doctor --base … --mend …",
        )


def _window(rule: Rule, saved: Saved, rope: Mapping[str, Any]) -> tuple[int, int]:
    """Return the default and the largest window."""
    found = [saved.text[key] for key in rule.length_keys if isinstance(saved.text.get(key), int)] or [saved.maximum]
    first = saved.text.get(rule.before_others or "")
    length = float(first if isinstance(first, int) else min(found) if rule.smallest else found[0])
    if rule.tokenizer:
        length = min(length, saved.tokenizer_maximum or math.inf)
    kind, factor = rope["rope_type"], float(rope.get("factor") or 1.0)
    if kind in rule.from_original:
        length = rope["original_max_position_embeddings"] * factor
    # Gemma 3's maximum is already scaled, and vLLM knows that.
    elif kind in rule.multiplied and not (rule.engine == "vllm" and "gemma3" in saved.model_type):
        length *= factor
    top = saved.text.get("original_max_position_embeddings")
    default = top if rule.longrope_default and kind == "longrope" and top else length
    return int(default), int(length)
