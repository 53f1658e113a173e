"""BeaconModel: the PEFT tuner. Its forward reads a text in intervals with the unmodified Hugging Face model.

Source: Zhang et al., Soaring from 4K to 400K: Extending LLM's Context with Activation Beacon, arXiv 2401.03462.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from pose_plugin.beacon import checks, ratios, rope
from pose_plugin.beacon.config import DEFAULT_TARGETS, BeaconConfig
from pose_plugin.beacon.forward import Reading
from pose_plugin.beacon.generation import Generation
from pose_plugin.beacon.layer import BeaconEmbedding, BeaconLayer, BeaconLinear, Router, cannot_merge, rows_of
from pose_plugin.beacon.register import PREFIX, find_tuner
from pose_plugin.utils.errors import PoSEError

ALONE = (
    "A Beacon adapter is saved without any other adapter. Merge that one first: model = other.merge_and_unload(), then "
    "get_peft_model(model, BeaconConfig(…))"
)


class BeaconModel(Generation, Reading, BaseTuner):
    """Activation Beacon over a decoder with q, k, v projections and RoPE.

    Made by `peft.get_peft_model(model, BeaconConfig(…))` or `PeftModel.from_pretrained`. The state of a text is in its
    BeaconCache, never here; the tuner only holds the step that training ratios are drawn for.
    """

    model: Any
    peft_config: Any
    prefix: str = PREFIX
    tuner_layer_cls = BeaconLayer
    # Makes PEFT refuse to inject the layers without this tuner, whose `forward` reads the intervals.
    uses_shared_state: bool = True

    # Injection.

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        check_alone(model)
        nn.Module.__init__(self)
        self.router = Router(self)
        self._hooks: list[Any] = []
        self._ratio_override: ratios.Ratio | None = None
        self._step = (0, 0)
        self.condensed_since_step = self.labels_behind_beacons = 0
        self._base_forward: Any = None
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)
        self.peft_config = self.model.peft_config = Configs(self.peft_config)
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            # Imported here, since it imports the Trainer, which only training needs.
            from pose_plugin.beacon.trainer import watch

            watch(self)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        return peft_config  # `_prepare_model` looks up the names in the model

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        checks.check_layers(model.config)
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        if peft_config.target_modules is None:
            found = (targets for targets in (set(DEFAULT_TARGETS), {"qkv_proj", "o_proj"}) if targets <= names)
            peft_config.target_modules = next(found, None)
        if peft_config.target_modules is None:
            raise PoSEError(
                f"target_modules: None, and {type(model).__name__} has no {', '.join(DEFAULT_TARGETS)}; name its "
                "query, key, value and output projections"
            )
        checks.resolve_window(peft_config, model.config, rope.find_rotary(model))
        checks.check_attention(getattr(model.config, "_attn_implementation", None), peft_config)

    def inject_adapter(self, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        # After PEFT's own injection: PEFT saves a target with the whole base embedding, and unfreezes one that was
        # wrapped before.
        config = self.peft_config[adapter_name]
        embedding = model.get_input_embeddings()
        eos = getattr(model.config, "eos_token_id", None)
        if isinstance(embedding, BeaconEmbedding):
            embedding.update_layer(adapter_name, config, eos)
        else:
            path = next(name for name, module in model.named_modules() if module is embedding)
            parent = model.get_submodule(path.rpartition(".")[0])
            wrapped = BeaconEmbedding(embedding, adapter_name, config, self.router, eos)
            setattr(parent, path.rpartition(".")[2], wrapped)
            embedding = wrapped
        embedding.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        if adapter_name not in self.active_adapters:
            embedding.beacon_embedding[adapter_name].requires_grad_(False)
        self._attach(model, adapter_name)

    def _attach(self, model: Any, adapter_name: str) -> None:
        self._detach()
        attentions = []
        for name, module in model.named_modules():
            own = {key for key, child in module.named_children() if isinstance(child, BeaconLinear)}
            if not own or not hasattr(module, "layer_idx"):
                continue
            attentions.append(module)
            if not ({"k_proj", "v_proj"} <= own or any("qkv" in key or "kv_" in key for key in own)):
                raise PoSEError(
                    f"target_modules: beacons need their own keys and values, but {name} has only {sorted(own)}; add "
                    "k_proj and v_proj"
                )
        if not attentions:
            raise PoSEError(
                f"target_modules: {self.peft_config[adapter_name].target_modules} names no attention projection of "
                f"{type(model).__name__}; add k_proj and v_proj"
            )
        self._attentions = attentions
        self._hooks = [module.register_forward_pre_hook(self.router, with_kwargs=True) for module in attentions]
        self._decoder_layers = [m for m in model.modules() if hasattr(m, "_can_checkpoint_with_cache")]
        for layer in self._decoder_layers:
            # Otherwise transformers drops the cache of checkpointed layers, and with it the memory.
            layer._can_checkpoint_with_cache = True
        model.resize_token_embeddings = functools.partial(resize, self.router)
        # In a list, since a module as an attribute would become a second child of the same weights.
        self._rotary = [rope.find_rotary(model)]
        self._rotating: list[bool] | None = None

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model.__dict__.pop("resize_token_embeddings", None)
        for layer in getattr(self, "_decoder_layers", []):
            layer.__dict__.pop("_can_checkpoint_with_cache", None)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, nn.Embedding | BeaconEmbedding) or target is self.model.get_output_embeddings():
            raise PoSEError(
                f"target_modules: {peft_config.target_modules!r} matches {current_key}, which would be saved with the "
                "adapter; match projections only, the beacon's own embedding is always trained"
            )
        if isinstance(target, BeaconLinear):
            target.update_layer(adapter_name, peft_config)
            return
        layer = BeaconLinear(target, adapter_name, peft_config, self.router)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Keep the dtype: full copies in fp32 would double a bf16 adapter. `BeaconConfig.dtype` can ask for fp32."""

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # PEFT drops the argument silently for tuners that do not know it.
        names = kwargs.get("adapter_names")
        if names is not None and any(name not in self.active_adapters for name in names):
            raise PoSEError(
                f"adapter_names: {names}; Beacon reads a batch with one adapter, now {self.active_adapters}. Call "
                "set_adapter(name) and read the rows of each adapter separately"
            )
        yield

    def _check_merge_allowed(self) -> None:
        raise cannot_merge()

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            raise cannot_merge()
        self._detach()
        return super()._unload_and_optionally_merge(merge, *args, **kwargs)

    # What the passes need to know.

    @property
    def embedding(self) -> BeaconEmbedding:
        """The wrapped input embedding.

        Raises:
            PoSEError: it was replaced.
        """
        found = self.model.get_input_embeddings()
        if not isinstance(found, BeaconEmbedding):
            raise PoSEError(
                f"model: its input embedding is a {type(found).__name__}, set after the Beacon adapter was made. Set "
                "it before get_peft_model, or use model.resize_token_embeddings"
            )
        return found

    @property
    def rotary(self) -> Any:
        """The base's rotary embedding."""
        return self._rotary[0]

    def rotates(self, layer: int) -> bool:
        """Return whether a layer's keys carry positions. Measured once, when something is first condensed."""
        if self._rotating is None:
            given, self.router.given = self.router.given, None
            modules = list(self.model.modules())
            self._rotating = rope.rotating_layers(self._call, self.cache_key, self.rotary, modules)
            self.router.given = given
        return self._rotating[layer]

    @property
    def probe(self) -> Any:
        """A projection of the base, to see what state its weights are in."""
        children = self._attentions[0].children()
        return next(child for child in children if isinstance(child, BeaconLinear)).get_base_layer()

    @property
    def attention(self) -> str:
        """The base's attn_implementation."""
        return str(getattr(self.model.config, "_attn_implementation", None))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of attention scores; an additive mask must have it."""
        kind = self.model.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype

    @property
    def cache_key(self) -> str:
        """The model's name for its cache argument: `cache` from transformers 5.24 on, `past_key_values` before."""
        return "cache" if "cache" in self.accepts else "past_key_values"

    @property
    def accepts(self) -> frozenset[str]:
        """Names of the arguments of the model's forward."""
        return _parameters(type(self.model))  # type: ignore[arg-type]

    @property
    def active_config(self) -> BeaconConfig:
        """The active adapter's configuration.

        Raises:
            PoSEError: several are active; beacons have one set of projections at a time.
        """
        names = self.active_adapters
        if len(names) != 1:
            raise PoSEError(
                f"adapter: {names} are active; Beacon reads with one adapter at a time, use set_adapter(name)"
            )
        return self.peft_config[names[0]]

    @property
    def window(self) -> ratios.BeaconWindow:
        """Sizes of the active adapter."""
        config = self.active_config
        return config.sizes(checks.resolve_window(config, self.model.config, self.rotary))

    @property
    def disabled(self) -> bool:
        return not self.active_adapters or self.embedding.disable_adapters


@functools.lru_cache
def _parameters(model_cls: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_cls.forward).parameters)


class Configs(dict[str, Any]):
    """A tuner's configurations by adapter name. Rejects others, which a tuner on top of this one would write here."""

    def __setitem__(self, name: str, config: Any) -> None:
        if not isinstance(config, BeaconConfig):
            raise PoSEError(
                f"adapter: {name!r} has a {type(config).__name__}, but the model has Beacon adapters {sorted(self)}. "
                + ALONE
            )
        super().__setitem__(name, config)

    def update(self, *others: Any, **named: Any) -> None:
        for name, config in dict(*others, **named).items():
            self[name] = config  # dict.update would not call __setitem__


def check_alone(model: nn.Module) -> None:
    """Require a model without adapters.

    Raises:
        PoSEError: it has Beacon layers, or another adapter.
    """
    layers = [type(module) for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(issubclass(layer, BeaconLayer) for layer in layers):
        raise PoSEError(
            "model: it has Beacon layers already. To add another Beacon adapter, call model.add_adapter(name, config) "
            "on the PEFT model; to start again, take the base back with its unload(), or load the base again"
        )
    if layers or isinstance(model, PeftModel):
        found = layers[0].__module__.split(".")[-2] if layers else type(model).__name__
        raise PoSEError(f"model: it has an adapter of another kind ({found}). {ALONE}")


def resize(router: Router, *args: Any, **kwargs: Any) -> nn.Module:
    """Call the model's own resize_token_embeddings, which does not know the wrapped embedding.

    Args:
        router: of the model's Beacon layers. Not the tuner: this function is stored on the model, which may be copied.
        args, kwargs: of resize_token_embeddings.

    Returns:
        The wrapped input embedding.

    Raises:
        PoSEError: the tuner was dropped.
    """
    tuner = router.driver()
    model, wrapped = tuner.model, tuner.embedding
    model.set_input_embeddings(wrapped.base_layer)
    try:
        type(model).resize_token_embeddings(model, *args, **kwargs)
    finally:
        wrapped.base_layer = model.get_input_embeddings()
        wrapped.sentinel = rows_of(wrapped.base_layer)
        model.set_input_embeddings(wrapped)
    return wrapped


@contextmanager
def condensing(model: Any, ratio: int | str | None = None, compression_ratio: float | None = None) -> Iterator[Any]:
    """Condense all texts that are read in this block at one ratio.

    Args:
        model: a PEFT model with a Beacon adapter.
        ratio: α, raw tokens per beacon, or "adapt".
        compression_ratio: instead of `ratio`, the share of the cache that is removed, as in kvpress: 0.875 is ratio 8.

    Examples:
        >>> with condensing(model, ratio=8):
        ...     answer = model.generate(ids, max_new_tokens=32)

    Raises:
        PoSEError: the model has no Beacon adapter, or the ratio is not valid.
    """
    tuner = find_tuner(model)
    if (ratio is None) == (compression_ratio is None):
        raise PoSEError("condensing: give either ratio (e.g. 8) or compression_ratio (e.g. 0.875)")
    if compression_ratio is not None:
        ratio = ratios.from_compression(compression_ratio)
    if ratio != ratios.ADAPT:
        ratio = ratios.check_ratio(ratio, tuner.active_config.interval)
    before = tuner._ratio_override
    tuner._ratio_override = ratio
    try:
        yield model
    finally:
        tuner._ratio_override = before
