"""Estimate the GPU memory of a training step from sizes. No weights are loaded and nothing is measured.

Bytes of a trained parameter: its weight, its gradient and the optimizer's state (ZeRO, arXiv 1910.02054, section 3:
2 + 2 + 12 with Adam in mixed precision). A frozen parameter has only its weight; in NF4 with double quantisation that
is 4.127 bits (QLoRA, arXiv 2305.14314). ZeRO divides the optimizer's state by the number of GPUs from stage 1 on,
gradients from stage 2 and weights from stage 3.

Bytes per token that one layer keeps for its backward pass, in bf16 with fused attention (the tensors that autograd
saves in a transformers Llama; Korthikanti et al., arXiv 2205.05198, count other layers in the same way):

    16·hidden + 4·queries + 4·keys + 8·intermediate + 4·heads + 8

With gradient checkpointing each layer keeps only its input, 2·hidden, and one layer at a time keeps all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pose_plugin.rope.live import skeleton
from pose_plugin.rope.read import as_config, lookup
from pose_plugin.utils.errors import PoSEError, regular_expression
from pose_plugin.utils.models import embeddings_and_norms

Method = Literal["full", "lora", "qlora", "8bit", "beacon"]
# Bits of an NF4 weight: 4, one 8-bit constant per 64 weights, and one 32-bit constant per 256 of these constants.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
# Without double quantisation the constant of each 64 weights has 32 bits.
NF4_BITS_SINGLE = 4 + 32 / 64
_BITS = {"nf4": NF4_BITS, "nf4-single": NF4_BITS_SINGLE, "int8": 8.0}
# Numbers that an optimizer keeps per parameter, and the bytes of each; None: as wide as the weight that it updates.
OPTIMIZERS: dict[str, tuple[int, float | None]] = {
    "adamw": (2, None),
    "adamw_8bit": (2, 1 + 4 / 256),
    "adamw_4bit": (2, 0.5 + 4 / 128),
    "lion": (1, None),
    "lion_8bit": (1, 1 + 4 / 256),
    "adafactor": (0, None),
    "sgd": (0, None),
}
# Per token and vocabulary entry: bf16 logits (2), float32 log-probabilities (4), and the gradients of both.
_LOGIT_BYTES = 12


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder.

    Attributes:
        total: all parameters; a tied output head counts once.
        embeddings: parameters of the input embeddings.
        layer: parameters of one layer, as the mean of all layers.
        vocabulary, hidden, layers, heads: as in the config.
        queries, key_values: numbers per token and layer in all queries, and in all keys (as many as in all values).
        intermediate: width of the MLP that one token passes, over all of its experts.
        modules: parameters of each module by its full name.
        linear: shape of each linear map's weight by its full name, the output head included.
        head: full name of the output head.
        experts: parameters of experts that are kept as one tensor per layer, which are not linear maps.
        beside_lora: full names of "embeddings" and "norms", which a large stretch needs trained beside LoRA. Without
            embeddings that are also the output head: PEFT would train the one apart from the other.
        known: whether transformers knows the model type; if not, a Llama of the same sizes is counted.
    """

    total: int
    embeddings: int
    layer: int
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    queries: int
    key_values: int
    intermediate: int
    modules: Mapping[str, int]
    linear: Mapping[str, tuple[int, int]]
    head: str
    experts: int
    beside_lora: Mapping[str, list[str]]
    known: bool = True

    def quantised(self, experts: bool = False) -> int:
        """Return how many weights bitsandbytes quantises: those of linear maps, without the output head."""
        maps = sum(rows * columns for name, (rows, columns) in self.linear.items() if name != self.head)
        return maps + (self.experts if experts else 0)

    def targets(self, names: list[str] | str) -> list[str]:
        """Return the full names of the linear maps that PEFT's `target_modules` selects.

        Args:
            names: endings of module names, a regular expression, or "all-linear".

        Raises:
            PoSEError: a name selects nothing, which PEFT ignores if another name selects something; or the text is no
                regular expression.
        """
        if names == "all-linear":
            return [name for name in self.linear if name != self.head]
        if isinstance(names, str):
            pattern = regular_expression("target modules", names)
            found = {names: [name for name in self.linear if pattern.fullmatch(name)]}
        else:
            found = {each: [name for name in self.linear if f".{name}".endswith(f".{each}")] for each in names}
        missing = [each for each, selected in found.items() if not selected]
        if missing:
            has = sorted({name.rpartition(".")[2] for name in self.linear})
            raise PoSEError(
                f"target modules: {missing[0]!r} selects no linear layer of this model; it has {', '.join(has)}"
            )
        return sorted({name for selected in found.values() for name in selected})

    def lora(self, rank: int, names: list[str] | str) -> int:
        """Return the parameters of LoRA matrices on the selected linear maps: rank·(in + out) (arXiv 2106.09685)."""
        return rank * sum(sum(self.linear[name]) for name in self.targets(names))

    def whole(self, names: list[str]) -> int:
        """Return the parameters of the modules that PEFT's `modules_to_save` selects.

        PEFT selects every module whose name ends with one of the names, so `norm` selects all norms.
        """
        return sum(size for name, size in self.modules.items() if name.endswith(tuple(names)))


def architecture(config: Any) -> Architecture:
    """Count a model's parameters by building it without memory, on torch's meta device.

    Args:
        config: a transformers config or the dict of a config.json; each family's defaults fill missing keys. Of a model
            with images only the text part is counted, if it can be built alone.

    Raises:
        PoSEError: transformers cannot build a causal language model from the config, or it has no attention heads.
    """
    try:
        config = as_config(config)
        known = not isinstance(config, Mapping)
        config = config if known else as_config({**config, "model_type": "llama"})
        text = config.get_text_config()
        model = skeleton(config)
    except Exception as error:  # transformers raises a different type for each kind of wrong value
        reason = " ".join(str(error).split())[:300]
        raise PoSEError(
            f"transformers cannot build a model from the base's config.json: {reason}. Correct that file, or "
            "choose another base"
        ) from error
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):  # e.g. a state space model, or a number of heads per layer
        raise PoSEError(f"model_type={text.model_type!r}: num_attention_heads={heads!r} must be one whole number")
    from torch import nn

    modules = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules() if name}
    total = sum(parameter.numel() for parameter in model.parameters())
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {id(p): p.numel() for module in (embeddings, head) for p in module.parameters()}  # a tied weight once
    # Experts are kept as one tensor; the convolutions of linear-attention layers have three dimensions too.
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3 and id(p) not in convolutions)
    # Gemma 4 E2B raises an error if a value that differs between layers is read from the whole config.
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // heads
    return Architecture(
        total=total,
        embeddings=embeddings.weight.numel(),
        layer=(total - sum(outside.values())) // text.num_hidden_layers,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        queries=heads * head_dim,
        key_values=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        intermediate=_intermediate(text, bool(experts)),
        modules=modules,
        linear=_linear(model),
        head=next(name for name, module in model.named_modules() if module is head),
        experts=experts,
        beside_lora=_beside_lora(model, bool(lookup(text, "tie_word_embeddings"))),
        known=known,
    )


def _linear(model: Any) -> dict[str, tuple[int, int]]:
    """Return the shapes of linear maps. Routers and fused experts are none, and PEFT does not select them."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear map

    maps = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    return {name: (rows, columns) for name, (rows, columns) in maps.items()}


def _beside_lora(model: Any, tied: bool) -> dict[str, list[str]]:
    found = embeddings_and_norms(model)
    return {part: paths for part, paths in found.items() if paths and not (tied and part == "embeddings")}


def _intermediate(text: Any, mixture: bool) -> int:
    """Return the width of the MLP that one token passes: of all its experts, or of the widest layer."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if isinstance(width, list):
        width = max(width)
    if not mixture:
        return int(width)
    return int(getattr(text, "moe_intermediate_size", None) or width) * int(text.num_experts_per_tok)


@dataclass(frozen=True)
class Run:
    """What the memory of a step depends on, in addition to the model.

    Attributes:
        lora_rank: of the adapter; with beacon, rank 0 means that the targets are copied whole.
        lora_targets: as PEFT's `target_modules`.
        saved_modules: trained whole in addition to the adapter.
        quantised: how the frozen linear maps are kept; None if they are not quantised.
        quantised_experts: whether fused experts are quantised too (Axolotl's `quantize_moe_experts`).
        weight_bytes: per weight that is not quantised: 2 in bf16, 4 in float32.
        trained_bytes: per trained weight, and per gradient of it. Adapters and modules next to them are in float32.
        master: whether there is a float32 copy of trained bf16 weights, as DeepSpeed keeps it, with its optimizer.
        stage: of ZeRO; 3 also for FSDP with full sharding.
        offload: whether the optimizer's state is kept outside of the GPU.
        eager: whether attention keeps its scores (`attn_implementation: eager`).
        fused_loss: whether the loss is computed without all logits at once.
        rows, window: rows of a batch on each GPU, and tokens of a row.
        gpus_of_a_row: GPUs that read the same rows, under tensor or context parallelism.
    """

    method: Method = "full"
    lora_rank: int = 0
    lora_targets: list[str] | str = field(default_factory=list)
    saved_modules: list[str] = field(default_factory=list)
    quantised: Literal["nf4", "nf4-single", "int8"] | None = None
    quantised_experts: bool = False
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
    gpus_of_a_row: int = 1

    @property
    def groups(self) -> int:
        """Return how many GPUs, or groups of GPUs, read different rows."""
        return self.gpus // self.gpus_of_a_row


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
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the bytes by what they are for."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "gathered")
        return {name: getattr(self, name) for name in names}


def memory(model: Architecture, run: Run) -> Memory:
    """Estimate the bytes on each GPU for one step of `run.rows` rows of `run.window` tokens."""
    trained = _trained(model, run)
    if run.method == "full":
        weights = trained * float(run.trained_bytes)
    else:
        # The base stays frozen, and PEFT keeps the originals of modules that are trained whole.
        weights = model.total * float(run.weight_bytes) + trained * run.trained_bytes
        if run.quantised:
            weights += model.quantised(run.quantised_experts) * (_BITS[run.quantised] / 8 - run.weight_bytes)
    count, wide = OPTIMIZERS[run.optimizer]
    width = wide if wide is not None else (4.0 if run.master else float(run.trained_bytes))
    optimizer = trained * (count * width + (4.0 if run.master else 0.0))
    share = 1 / max(run.gpus, 1)
    gathered = 0.0
    if run.stage >= 3:
        # One layer is gathered for its computation while the next one is fetched; the embeddings are gathered once.
        gathered = max(2 * model.layer, model.embeddings) * 2.0 * (1 - share)
    return Memory(
        weights=weights * (share if run.stage >= 3 else 1),
        gradients=trained * run.trained_bytes * (share if run.stage >= 2 else 1),
        optimizer=0.0 if run.offload else optimizer * (share if run.stage >= 1 else 1),
        activations=activations(model, run),
        logits=0.0 if run.fused_loss else float(_LOGIT_BYTES) * run.rows * run.window * model.vocabulary,
        gathered=gathered,
        trained_parameters=trained,
    )


def _trained(model: Architecture, run: Run) -> int:
    """Return how many parameters are trained."""
    if run.method == "full":
        return model.total
    if run.method != "beacon":
        return model.lora(run.lora_rank, run.lora_targets) + model.whole(run.saved_modules)
    # Beacons have copies of the projections (or LoRA on them) and one embedding.
    if run.lora_rank:
        return model.lora(run.lora_rank, run.lora_targets) + model.hidden
    return sum(model.modules[name] for name in model.targets(run.lora_targets)) + model.hidden


def layer_bytes(model: Architecture, window: int, eager: bool = False, element: int = 2) -> float:
    """Return the bytes per token that one layer keeps for its backward pass.

    Args:
        window: tokens of a row; with eager attention each token keeps a score for every one of them.
        element: bytes of an activation, 2 in bf16 and 4 in float32.
    """
    kept = element * (4 * model.hidden + 2 * model.queries + 2 * model.key_values + 4 * model.intermediate)
    # The norms' inputs in float32, and one number per head and per norm.
    kept += 8 * model.hidden + 4 * model.heads + 8
    if eager:
        # Scores in float32 and, if the model is narrower, once more in its own type. Keys and values are repeated to
        # as many heads as queries have, and the log-sum-exp of fused attention is not needed.
        scores = model.heads * window * (4 + (element if element < 4 else 0))
        kept += scores + 2 * element * (model.queries - model.key_values) - 4 * model.heads
    return float(kept)


def activations(model: Architecture, run: Run) -> float:
    """Return the bytes that one step keeps from the forward to the backward pass."""
    layer = layer_bytes(model, run.window, run.eager, run.weight_bytes)
    kept = model.layers * run.weight_bytes * model.hidden + layer if run.checkpointing else model.layers * layer
    return kept * run.rows * run.window
