"""The reach table of a base: which layers rotate, how far each one sees, and what an extension can change.

RoPE only acts where a layer rotates queries and keys, and a longer window only helps where a layer sees that far. In
many models of today these are different layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pose_plugin.rope.read import lookup

# Only layers with a sliding window rotate; those with full attention have no positions.
_ROTARY_WHERE_SLIDING = ("cohere2", "cohere2_moe", "afmoe")
# The same, unless the model has no sliding window at all.
_ROTARY_UNLESS_FULL = ("exaone4", "exaone_moe")


@dataclass(frozen=True)
class LayerKind:
    """The layers of one kind.

    Attributes:
        name: as the config calls it, e.g. "sliding_attention".
        layers: how many.
        attends: False for layers that keep a state instead of attending to tokens (linear attention, convolution).
        rotates: whether queries and keys are rotated.
        sees: how many tokens back a token attends; None: all.
        chunks: whether `sees` is the length of fixed chunks instead of a window that moves along.
        frequencies: the rope type, e.g. "yarn"; None if the layers do not rotate.
        shared: whether its rope is also that of layers that see farther, so it is stretched with them.
    """

    name: str
    layers: int
    attends: bool
    rotates: bool
    sees: int | None
    chunks: bool = False
    frequencies: str | None = None
    shared: bool = False

    @property
    def span(self) -> str:
        """Return how far a token of these layers sees, in words."""
        if not self.attends:
            return "a state"
        if self.sees is None:
            return "all tokens"
        return f"chunks of {self.sees}" if self.chunks else f"{self.sees} tokens"

    def sees_beyond(self, length: int) -> bool:
        """Return whether a token attends more than `length` tokens back."""
        return self.attends and (self.sees is None or self.sees > length)

    def change(self, original: int, stretched: bool = True) -> str:
        """Return what an extension of RoPE can change in these layers.

        Args:
            original: L_0, the window that the base was trained with.
            stretched: False if the extension leaves the frequencies as they are, as `rope: none` does.
        """
        if not self.attends:
            return "nothing: they read tokens in order and know no positions"
        if not self.rotates:
            return "nothing: they know no positions"
        if not stretched:
            return "nothing: their frequencies stay as they are"
        if self.sees_beyond(original):
            return "their frequencies are stretched"
        if self.shared:
            return "their frequencies are stretched too, although they see no farther than before"
        return "nothing: they see no farther than the original window"


def reach(text: Any, parameters: Mapping[str, Any], rotary: bool = True) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of a decoder, in the order in which they first appear.

    Args:
        text: the decoder's config or dict.
        parameters: its rope dict, flat or one dict per layer type.
        rotary: False if the class has no rotary module.
    """
    types = layer_types(text)
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    found: dict[tuple[str, bool], int] = {}
    for index, name in enumerate(types):
        rotates = rotary and _attends(name) and _rotates(text, parameters, nested, name, index)
        found[name, rotates] = found.get((name, rotates), 0) + 1
    far = any(rotates and _sees(text, name)[0] is None for name, rotates in found)
    table = []
    for (name, rotates), count in found.items():
        rope = (parameters.get(name) or {}) if nested else parameters
        sees, chunks = _sees(text, name)
        table.append(
            LayerKind(
                name=name,
                layers=count,
                attends=_attends(name),
                rotates=rotates,
                sees=sees,
                chunks=chunks,
                frequencies=str(rope.get("rope_type", "default")) if rotates else None,
                shared=far and not nested and sees is not None,
            )
        )
    return tuple(table)


def layer_types(text: Any) -> list[str]:
    """Return the kind of each layer, as the config calls it."""
    for key in ("layer_types", "layers_block_type"):
        types = lookup(text, key)
        if isinstance(types, Sequence) and types:
            return [str(name) for name in types]
    windowed = lookup(text, "sliding_window") and lookup(text, "use_sliding_window") is not False
    return ["sliding_attention" if windowed else "full_attention"] * int(lookup(text, "num_hidden_layers") or 1)


def _attends(name: str) -> bool:
    return ("attention" in name or name in ("full", "hybrid")) and not name.startswith("linear")


def _sees(text: Any, name: str) -> tuple[int | None, bool]:
    """Return how far layers of this kind see, and whether in chunks."""
    if "chunked" in name:
        size = lookup(text, "attention_chunk_size")
        return (int(size) if size else None), bool(size)
    if "sliding" in name or lookup(text, "model_type") == "recurrent_gemma":
        window = lookup(text, "sliding_window") or lookup(text, "attention_window_size")
        return (int(window) if window else None), False
    return None, False


def _rotates(text: Any, parameters: Mapping[str, Any], nested: bool, name: str, index: int) -> bool:
    if nested and not parameters.get(name):
        return False
    if lookup(text, "position_embedding_type") in ("nope", "none"):
        return False
    rotating = lookup(text, "no_rope_layers")  # in spite of its name, 1 means that the layer rotates
    if isinstance(rotating, Sequence) and len(rotating) > index:
        return bool(rotating[index])
    model_type = lookup(text, "model_type")
    if model_type in _ROTARY_WHERE_SLIDING or (model_type in _ROTARY_UNLESS_FULL and lookup(text, "sliding_window")):
        return "sliding" in name
    return True
