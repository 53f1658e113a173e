"""What a training step takes on each GPU, reckoned from sizes: no model is built and nothing is measured here.

Bytes of a trained parameter: its weight, its gradient and what the optimizer keeps (ZeRO, arXiv 1910.02054, section 3:
2 + 2 + 12 with Adam in mixed precision). A frozen one has its weight alone; in NF4 with double quantisation 4.127 bits
(QLoRA, arXiv 2305.14314). ZeRO divides the optimizer by the GPUs from stage 1, gradients from 2, weights from 3.

What a layer keeps for its backward pass, a token, in bytes of bf16 with fused attention (what autograd keeps of a
transformers Llama; Korthikanti et al., arXiv 2205.05198, count other layers in the same way):

    16·hidden + 4·queries + 4·keys + 8·intermediate + 4·heads + 8

With gradient checkpointing a layer keeps its input, 2·hidden, and one layer at a time keeps all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pose_plugin.rope.read import lookup, text_config
from pose_plugin.utils.errors import PoSEError

Method = Literal["full", "lora", "qlora", "8bit", "beacon"]
# Bits of a weight in NF4: 4, and the constants of each 64 weights in 8 bits, those of each 256 of them in 32.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
NF4_BITS_SINGLE = 4 + 32 / 64
_BITS = {"nf4": NF4_BITS, "nf4-single": NF4_BITS_SINGLE, "int8": 8.0}
# Numbers that the optimizer keeps of a parameter, and bytes of each; None: as wide as the trained weight.
OPTIMIZERS: dict[str, tuple[int, float | None]] = {
    "adamw": (2, None),
    "adamw_8bit": (2, 1 + 4 / 256),
    "adamw_4bit": (2, 0.5 + 4 / 128),
    "lion": (1, None),
    "lion_8bit": (1, 1 + 4 / 256),
    "adafactor": (0, None),
    "sgd": (0, None),
}
# bf16 logits, their float32 log-probabilities, and the gradients of both.
_LOGIT = 12
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


@dataclass(frozen=True)
class Run:
    """What the memory of a step depends on, beside the model.

    Attributes:
        lora_rank, lora_targets: of the adapter; with beacon a rank of 0 stands for whole copies of the targets.
        quantised: how the frozen linear maps are kept, None for as they are.
        saved_modules: trained whole beside it.
        weight_bytes: of a weight that is not quantised: 2 in bf16, 4 in float32.
        trained_bytes: of a trained weight and of its gradient. float32 for adapters, for what is trained beside them,
            and where the trainer computes in bf16 beside float32 weights.
        master: a float32 copy of trained bf16 weights, as DeepSpeed keeps it, with its optimizer.
        stage: of ZeRO; 3 also for FSDP with full sharding.
        offload: the optimizer is kept outside of the GPU.
        fused_loss: the loss is computed without all logits at once.
    """

    method: Method = "full"
    lora_rank: int = 0
    lora_targets: list[str] = field(default_factory=list)
    saved_modules: list[str] = field(default_factory=list)
    quantised: Literal["nf4", "nf4-single", "int8"] | None = None
    weight_bytes: int = 2
    trained_bytes: int = 2
    master: bool = False
    optimizer: str = "adamw"
    stage: int = 0
    gpus: int = 1
    offload: bool = False
    checkpointing: bool = False
    eager: bool = False
    fused_loss: bool = False
    rows: int = 1
    window: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    trained_parameters: int

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.gathered

    def parts(self) -> dict[str, float]:
        names = ("weights", "gradients", "optimizer", "activations", "logits", "gathered")
        return {name: getattr(self, name) for name in names}


def memory(model: Architecture, run: Run) -> Memory:
    """Reckons a step of `rows` rows of `window` tokens on each GPU."""
    trained = model.total
    weights = model.total * float(run.trained_bytes if run.method == "full" else run.weight_bytes)
    if run.method != "full":
        trained = _beside(model, run)
        if run.quantised:
            # Embeddings, the output head and norms are not quantised.
            weights += model.layers * model.layer_linear * (_BITS[run.quantised] / 8 - run.weight_bytes)
        # PEFT keeps what was there of modules that are trained whole.
        weights += trained * run.trained_bytes
    gradients = trained * float(run.trained_bytes)
    count, wide = OPTIMIZERS[run.optimizer]
    width = wide if wide is not None else (4.0 if run.master else float(run.trained_bytes))
    optimizer = trained * (count * width + (4.0 if run.master else 0.0))
    share = 1 / max(run.gpus, 1)
    gathered = 0.0
    if run.stage >= 3:
        # A layer is put together while it works, and the next one is fetched meanwhile; the embeddings once.
        wide_layer = max(2 * model.layer_linear, model.embeddings)
        gathered = wide_layer * 2.0 * (1 - share)
    return Memory(
        weights=weights * (share if run.stage >= 3 else 1),
        gradients=gradients * (share if run.stage >= 2 else 1),
        optimizer=0.0 if run.offload else optimizer * (share if run.stage >= 1 else 1),
        activations=activations(model, run),
        logits=0.0 if run.fused_loss else float(_LOGIT) * run.rows * run.window * model.vocabulary,
        gathered=gathered,
        trained_parameters=trained,
    )


def _beside(model: Architecture, run: Run) -> int:
    """Parameters of an adapter and of what is trained whole beside it."""
    if run.method != "beacon":
        return model.lora(run.lora_rank, run.lora_targets) + model.beside(run.saved_modules)
    own = model.lora(run.lora_rank, run.lora_targets) if run.lora_rank else model.beside(run.lora_targets)
    # And the beacon's own embedding.
    return own + model.hidden


def layer_bytes(model: Architecture, window: int, eager: bool = False, element: int = 2) -> float:
    """What a layer keeps of a token for its backward pass, in bytes.

    Args:
        window: tokens of a row; with eager attention each token keeps a score for all of them.
        element: bytes of an activation, 2 in bf16 and 4 in float32.
    """
    intermediate = model.intermediate * model.experts_used
    kept = element * (4 * model.hidden + 2 * model.queries + 2 * model.key_values + 4 * intermediate)
    # The norms' inputs in float32, and a number for each head and norm.
    kept += 8 * model.hidden + 4 * model.heads + 8
    if eager:
        scores = model.heads * window * (4 + (element if element < 4 else 0))
        kept += scores + 2 * element * (model.queries - model.key_values) - 4 * model.heads
    return float(kept)


def activations(model: Architecture, run: Run) -> float:
    """Bytes kept from the forward to the backward pass of one step."""
    layer = layer_bytes(model, run.window, run.eager, run.weight_bytes)
    kept = model.layers * run.weight_bytes * model.hidden + layer if run.checkpointing else model.layers * layer
    return kept * run.rows * run.window
