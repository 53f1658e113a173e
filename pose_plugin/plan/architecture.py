"""Parameters of a decoder by what they are for, counted from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pose_plugin.rope.read import lookup, text_config
from pose_plugin.utils.errors import PoSEError

# Biases of attention that no key of the config tells.
_BIASED = ("qwen2", "qwen2_moe")
# Norms of a layer where they are not these two; and whether queries and keys have norms of their own.
_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_NORMS = {"gemma2": _FOUR, "gemma3": _FOUR, "gemma3_text": _FOUR}
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
# Families that these counts are held against in the tests.
KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3")


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder; elements are parameters.

    Attributes:
        hidden, intermediate, layers, heads, head_dim, key_value_heads, vocabulary: as in the config.
        embeddings: of the input; a tied output head adds none.
        head: of the output head, 0 where it is tied.
        linear: of a layer's linear maps by name, (in, out).
        biases: of these maps, where they have one.
        other: norms and biases of all layers, and the last norm.
        norms: of a layer by name.
        experts: copies of the MLP in a layer, 1 without a mixture.
        known: whether the family's count was held against its model.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    key_value_heads: int
    vocabulary: int
    embeddings: int
    head: int
    linear: Mapping[str, tuple[int, int]]
    biases: Mapping[str, int]
    other: int
    norms: Mapping[str, int]
    experts: int
    experts_used: int
    known: bool

    @property
    def queries(self) -> int:
        """Elements of all queries of a token in a layer."""
        return self.heads * self.head_dim

    @property
    def key_values(self) -> int:
        """Elements of the keys, or of the values, of a token in a layer."""
        return self.key_value_heads * self.head_dim

    def copies(self, name: str) -> int:
        """How many linear maps of that name a layer has."""
        return self.experts if name in ("gate_proj", "up_proj", "down_proj") else 1

    @property
    def layer_linear(self) -> int:
        """Parameters of the linear maps of one layer."""
        return sum(a * b * self.copies(name) for name, (a, b) in self.linear.items())

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embeddings + self.head + self.layers * self.layer_linear + self.other

    def lora(self, rank: int, targets: list[str]) -> int:
        """Parameters of LoRA matrices of that rank on the named linear maps (arXiv 2106.09685).

        Raises:
            PoSEError: a target that this decoder does not have.
        """
        unknown = [name for name in targets if name not in self.linear and name != "lm_head"]
        if unknown:
            raise PoSEError(
                f"lora_target_modules has {unknown[0]}, which this model does not have; it has "
                f"{', '.join([*self.linear, 'lm_head'])}"
            )
        inside = sum(rank * sum(self.linear[name]) * self.copies(name) for name in targets if name in self.linear)
        return self.layers * inside + rank * (self.hidden + self.vocabulary) * ("lm_head" in targets)

    def beside(self, names: list[str]) -> int:
        """Parameters of the modules that are trained whole beside an adapter.

        PEFT takes every module whose name ends in one of the names: `norm` is all norms.
        """
        sizes = {"embed_tokens": self.embeddings, "lm_head": self.head or self.embeddings, "norm": self.hidden}
        sizes |= {
            name: self.layers * self.copies(name) * (a * b + self.biases.get(name, 0))
            for name, (a, b) in self.linear.items()
        }
        sizes |= {name: self.layers * size for name, size in self.norms.items()}
        endings = tuple(name.rsplit(".", 1)[-1] for name in names)
        return sum(size for name, size in sizes.items() if endings and name.endswith(endings))


def architecture(config: Any) -> Architecture:
    """Reads the sizes out of a config.

    Args:
        config: the dict of a config.json, or a transformers config.

    Raises:
        PoSEError: a size that every decoder has is missing.
    """
    text = text_config(config)

    def number(name: str, default: int | None = None) -> int:
        value = lookup(text, name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise PoSEError(
                f"the base's config.json has {name}={value!r}: without it no memory can be reckoned. Give a folder "
                "with the complete config.json by --base FOLDER"
            )
        return value

    family = str(lookup(text, "model_type", ""))
    hidden, layers, vocabulary = number("hidden_size"), number("num_hidden_layers"), number("vocab_size")
    intermediate, heads = number("intermediate_size"), number("num_attention_heads")
    grouped, head_dim = number("num_key_value_heads", heads), number("head_dim", hidden // max(heads, 1))
    experts = number("num_local_experts", lookup(text, "num_experts") or 1)
    width = number("moe_intermediate_size", intermediate) if experts > 1 else intermediate
    queries, key_values = heads * head_dim, grouped * head_dim
    linear = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, key_values),
        "v_proj": (hidden, key_values),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
    }
    biased = family in _BIASED or lookup(text, "attention_bias", False)
    biases = {"q_proj": queries, "k_proj": key_values, "v_proj": key_values} if biased else {}
    biases |= {"o_proj": hidden} if biased and family not in _BIASED else {}
    biases |= {"gate_proj": width, "up_proj": width, "down_proj": hidden} if lookup(text, "mlp_bias", False) else {}
    norms = dict.fromkeys(_NORMS.get(family, _TWO), hidden)
    norms |= dict.fromkeys(("q_norm", "k_norm"), head_dim) if family in _HEAD_NORMS else {}
    router = hidden * experts if experts > 1 else 0
    # These tie their heads without saying so in older config files.
    tied = lookup(text, "tie_word_embeddings", family.startswith(("gemma", "smollm3")))
    return Architecture(
        hidden=hidden,
        intermediate=width,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        key_value_heads=grouped,
        vocabulary=vocabulary,
        embeddings=vocabulary * hidden,
        head=0 if tied else vocabulary * hidden,
        linear=linear,
        biases=biases,
        other=layers * (sum(norms.values()) + sum(biases.values()) + router) + hidden,
        norms=norms,
        experts=experts,
        experts_used=number("num_experts_per_tok", 1) if experts > 1 else 1,
        known=family in KNOWN,
    )
