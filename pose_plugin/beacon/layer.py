"""The adapter's layers: raw rows go through the base's projections, beacon rows through the adapter's.

The model's code only calls `q_proj(x)` and does not pass which rows are beacons. So a `Router`, shared by the layers of
a model, holds the current pass. A hook on each attention module sets it from the pass's own cache view: a layer that
gradient checkpointing runs again in the backward pass is then routed like the first time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from pose_plugin.beacon import checks
from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.layout import RAW, Pass
from pose_plugin.beacon.views import IntervalView
from pose_plugin.utils.errors import PoSEError


class Router:
    """The pass that runs now, and the tuner that drives the model.

    The reference to the tuner is weak, since the tuner owns the model whose layers hold this router.
    """

    def __init__(self, tuner: Any = None) -> None:
        self.given: Pass | None = None
        self.seeds = 0
        self.tuner = weakref.ref(tuner) if tuner is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Router:
        # The copied layers must follow the copied tuner, or the old one if only the model is copied.
        twin = Router()
        memo[id(self)] = twin
        old = self.tuner() if self.tuner is not None else None
        if old is not None:
            twin.tuner = weakref.ref(memo.get(id(old), old))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be pickled.
        return {"given": None, "seeds": self.seeds, "tuner": None}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the pass, as forward pre-hook of an attention module."""
        view = kwargs.get("cache", kwargs.get("past_key_values"))
        self.given = view.given if isinstance(view, IntervalView) else None
        if self.tuner is not None:
            self.driver()

    def driver(self) -> Any:
        """Return the tuner.

        Raises:
            PoSEError: it was dropped.
        """
        tuner = self.tuner() if self.tuner is not None else None
        if tuner is None:
            raise PoSEError(
                "adapter: these Beacon layers have lost their tuner, so no text would be condensed. "
                "model.load_adapter() and inject_adapter_in_model() drop it: load with "
                "peft.PeftModel.from_pretrained(model, path) or get_peft_model, and keep the returned model"
            )
        return tuner


class BeaconLayer(BaseTunerLayer):
    """Base class of both layers: the base layer, the router and the active adapter."""

    def __init__(self, base_layer: nn.Module, router: Router) -> None:
        self.base_layer = base_layer
        self.router = router
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def active(self, names: Any) -> str | None:
        """Return the adapter that beacon rows use here; None if the layer has none."""
        return next((name for name in self.active_adapters if name in names), None)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise cannot_merge()

    def unmerge(self) -> None:
        raise cannot_merge()


def cannot_merge() -> PoSEError:
    """Return the error for merging, which would send raw tokens through the beacons' projections."""
    return PoSEError(
        "merge: a Beacon adapter cannot be merged, since its projections act on beacon rows only. Save it with "
        "save_pretrained and load it with PeftModel.from_pretrained; unload() returns the base"
    )


class BeaconLinear(nn.Module, BeaconLayer):
    """A projection with a second one for beacon rows: a full copy, or the base's plus a delta of rank r.

    Shapes: (batch, rows, in) → (batch, rows, out).
    """

    adapter_layer_names = ("beacon_proj", "beacon_A", "beacon_B")

    def __init__(self, base_layer: Any, adapter_name: str, config: BeaconConfig, router: Router) -> None:
        super().__init__()
        BeaconLayer.__init__(self, base_layer, router)
        self.in_features, self.out_features = int(base_layer.in_features), int(base_layer.out_features)
        self.beacon_proj = nn.ModuleDict({})
        self.beacon_A = nn.ModuleDict({})
        self.beacon_B = nn.ModuleDict({})
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: BeaconConfig) -> None:
        """Add an adapter: a copy starts as this layer's weights, dequantised; a delta starts as zero."""
        base: Any = self.get_base_layer()
        checks.check_unpacked(base, "copying its weights")
        with torch.no_grad(), _whole(base):
            if config.rank == 0:
                weight = dequantize_module_weight(base)
                dtype = config.torch_dtype() or getattr(base, "compute_dtype", None) or weight.dtype
                bias = getattr(base, "bias", None)
                copy = _linear(self.in_features, self.out_features, weight.device, dtype, bias is not None)
                if weight.device.type != "meta":
                    copy.weight.copy_(weight)
                    if bias is not None:
                        copy.bias.copy_(bias)
                self.beacon_proj[adapter_name] = copy
            else:
                device = base.weight.device
                dtype = config.torch_dtype() or _float(base)
                down = _linear(self.in_features, config.rank, device, dtype)
                up = _linear(config.rank, self.out_features, device, dtype)
                if device.type != "meta":
                    # A private generator, since adding an adapter must not change the state of the global one.
                    rng = torch.Generator().manual_seed(config.seed * 1_000_003 + self.router.seeds)
                    down.weight.copy_(torch.randn(down.weight.shape, generator=rng) / self.in_features**0.5)
                    up.weight.zero_()
                self.beacon_A[adapter_name], self.beacon_B[adapter_name] = down, up
        self.router.seeds += 1
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.router.given
        if given is None or not given.beacons or self.disable_adapters:
            return self.base_layer(x, *args, **kwargs)
        if (full := self.active(self.beacon_proj)) is not None:
            return route(x, given, self.base_layer, functools.partial(_apply, self.beacon_proj[full]))
        if (low := self.active(self.beacon_A)) is not None:
            return route(x, given, self.base_layer, lambda rows: self.base_layer(rows) + self.delta(rows, low))
        return self.base_layer(x, *args, **kwargs)

    def delta(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Return B·A·x for beacon rows, (batch, beacons, out)."""
        return _apply(self.beacon_B[name], _apply(self.beacon_A[name], rows))

    def touch(self, like: torch.Tensor) -> torch.Tensor:
        """Return a zero that depends on every beacon parameter of the active adapter; see `Reading.touch`."""
        # Through the modules' own forward: under ZeRO-3, only that makes a parameter whole.
        row = like.new_zeros(1, 1, self.in_features)
        total = like.new_zeros((), dtype=torch.float32)
        if (name := self.active(self.beacon_proj)) is not None:
            total = total + _apply(self.beacon_proj[name], row).float().sum() * 0
        if (name := self.active(self.beacon_A)) is not None:
            total = total + self.delta(row, name).float().sum() * 0
        return total


class BeaconEmbedding(nn.Module, BeaconLayer):
    """The input embedding with one more row, the beacon's: token id `sentinel`, which is the embedding's size.

    Vocabulary and lm_head are unchanged. Shapes: (batch, rows) → (batch, rows, hidden).
    """

    adapter_layer_names = ("beacon_embedding",)

    def __init__(self, base_layer: Any, adapter_name: str, config: BeaconConfig, router: Router, eos: Any) -> None:
        super().__init__()
        BeaconLayer.__init__(self, base_layer, router)
        self.sentinel = rows_of(base_layer)
        self.beacon_embedding = nn.ModuleDict({})
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, eos)

    def update_layer(self, adapter_name: str, config: BeaconConfig, eos: Any) -> None:
        """Add an adapter. Its row starts as the EOS token's embedding, as the base computes it.

        Args:
            eos: id of the EOS token, or several; None: the row starts as the mean of all embeddings.
        """
        base: Any = self.get_base_layer()
        with torch.no_grad(), _whole(base):
            weight = base.weight
            hidden = int(base.embedding_dim) if hasattr(base, "embedding_dim") else int(weight.shape[1])
            row = nn.utils.skip_init(
                nn.Embedding, 1, hidden, device=weight.device, dtype=config.torch_dtype() or _float(base)
            )
            if weight.device.type != "meta":
                first = eos[0] if isinstance(eos, list | tuple) and eos else eos
                if isinstance(first, int) and 0 <= first < self.sentinel:
                    start = base(torch.tensor([[first]], device=weight.device))[0]
                else:
                    start = weight.float().mean(0, keepdim=True)
                row.weight.copy_(start)
            self.beacon_embedding[adapter_name] = row
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def row(self) -> torch.Tensor:
        """Return the beacon's embedding, (1, hidden)."""
        embedding: Any = self.beacon_embedding[self.active(self.beacon_embedding)]  # type: ignore[index]
        return embedding(torch.zeros(1, dtype=torch.long, device=embedding.weight.device))

    @property
    def version(self) -> int:
        """A number that changes whenever the active adapter's embedding does; −1 if torch does not count changes."""
        name = self.active(self.beacon_embedding)
        weight: Any = self.beacon_embedding[name].weight if name is not None else None
        return -1 if weight is None or weight.is_inference() else int(weight._version)

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.router.given
        if given is None or not given.beacons or self.disable_adapters:
            return self.base_layer(ids, *args, **kwargs)
        beacon = ids == self.sentinel
        # The base has no row for the sentinel, so it looks up row 0 instead, which is then replaced.
        embedded = self.base_layer(torch.where(beacon, 0, ids), *args, **kwargs)
        return torch.where(beacon[..., None], self.row().to(embedded.dtype), embedded)

    def insert(self, embedded: torch.Tensor, given: Pass) -> torch.Tensor:
        """Put beacon rows between (or behind) embedded raw tokens: (batch, n, hidden) → (batch, rows, hidden)."""
        if not given.beacons:
            return embedded
        own = self.row().to(embedded.dtype).expand(embedded.shape[0], given.beacons, -1)
        return _ordered(torch.cat([embedded, own], dim=1), given)

    def touch(self, like: torch.Tensor) -> torch.Tensor:
        """Return a zero that depends on the beacon's embedding; see `Reading.touch`."""
        return self.row().float().sum() * 0


def rows_of(embedding: Any) -> int:
    """Return the number of tokens of an embedding."""
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def route(x: torch.Tensor, given: Pass, base: Callable[..., Any], own: Callable[..., Any]) -> torch.Tensor:
    """Compute raw rows with `base` and beacon rows with `own`, each for its rows only.

    Args:
        x: (batch, rows, in).
        given: the pass; its rows are the rows of x.

    Raises:
        PoSEError: x has other rows than the pass, as in experts that flatten the batch; it would be routed wrongly.
    """
    if x.shape[-2] != len(given.rows) or x.dim() != 3:
        raise PoSEError(
            f"model: a projection got input of shape {tuple(x.shape)}, not (batch, {len(given.rows)} rows, size), so "
            "beacon rows cannot be told apart; leave this module out of target_modules"
        )
    if not given.raw:
        return own(x)
    if given.order is None:
        return torch.cat([base(x[:, : given.raw]), own(x[:, given.raw :])], dim=1)
    raw = torch.tensor([row == RAW for row in given.rows], device=x.device).nonzero()[:, 0]
    beacon = torch.tensor([row != RAW for row in given.rows], device=x.device).nonzero()[:, 0]
    return _ordered(torch.cat([base(x.index_select(1, raw)), own(x.index_select(1, beacon))], dim=1), given)


def _ordered(rows: torch.Tensor, given: Pass) -> torch.Tensor:
    order = given.order
    return rows if order is None else rows.index_select(1, torch.tensor(order, device=rows.device))


def _apply(linear: Any, x: torch.Tensor) -> torch.Tensor:
    # Under autocast the linear casts by itself. Otherwise x is cast, so that a copy kept in fp32 computes in fp32.
    return linear(x if torch.is_autocast_enabled(x.device.type) else x.to(linear.weight.dtype)).to(x.dtype)


def _linear(rows: int, out: int, device: Any, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    # Without random initialisation, which would change the state of the global generator.
    return nn.utils.skip_init(nn.Linear, rows, out, bias=bias, device=device, dtype=dtype)


def _whole(base: Any) -> AbstractContextManager[Any]:
    # Under DeepSpeed ZeRO-3 each rank holds a part of a weight; copying needs the whole one.
    parts = [p for p in base.parameters() if hasattr(p, "ds_id")]
    if not parts:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parts)


def _float(base: Any) -> torch.dtype:
    dtype = getattr(base, "compute_dtype", None) or base.weight.dtype
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
