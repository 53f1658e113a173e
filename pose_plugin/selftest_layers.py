"""Finds attention layers that ignore positions, for the self-test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from pose_plugin.rope.read import text_config
from pose_plugin.utils.models import unwrap


class Layers:
    """Attention layers, whose outputs are compared for equal inputs at different positions.

    A layer's input depends on the positions as soon as one layer before it follows them. So `recorded` keeps the inputs
    and outputs of one forward, and `replayed` gives each layer its kept input again, at the new forward's positions.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {n: m for n, m in model.named_modules() if "attention" in type(m).__name__.lower()}
        self._lists = _lists_by_layer(unwrap(model).config)
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._change: dict[str, float] = {}

    def recorded(self) -> AbstractContextManager[None]:
        """Keep inputs and outputs inside the block."""
        return self._hooked(self._keep, self._keep_output)

    def replayed(self) -> AbstractContextManager[None]:
        """Feed the kept inputs inside the block, and compare the outputs."""
        return self._hooked(self._feed, self._compare)

    @contextmanager
    def _hooked(self, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
        handles = []
        try:
            for name, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
                handles.append(module.register_forward_hook(partial(after, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        # Layers that are given no positions cannot follow them, e.g. those of hybrid models without RoPE.
        if kwargs.get("position_embeddings") is not None or kwargs.get("position_ids") is not None:
            self._inputs[name] = (args[0] if args else kwargs["hidden_states"]).clone()

    def _keep_output(self, name: str, module: Any, args: Any, output: Any) -> None:
        self._outputs[name] = output[0] if isinstance(output, tuple) else output

    def _feed(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        if name not in self._inputs:
            return None
        if args:
            return (self._inputs[name], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._inputs[name]}

    def _compare(self, name: str, module: Any, args: Any, output: Any) -> None:
        if name in self._inputs:
            now = output[0] if isinstance(output, tuple) else output
            self._change[name] = float((now - self._outputs[name]).abs().max())

    def deaf(self) -> tuple[str, ...]:
        """Return the layers whose outputs stay exactly the same, unless all do or the config plans it so."""
        deaf = [name for name, change in self._change.items() if change == 0.0]
        if len(deaf) == len(self._change) or self._planned(deaf):
            return ()
        return tuple(deaf)

    def _planned(self, deaf: list[str]) -> bool:
        """Return whether a list of the config, one entry per layer, separates these layers from the others.

        Some models have layers without positions, e.g. by `no_rope_layers`, or those of a kind in `layer_types`.
        """
        numbers = {name: re.search(r"\.(\d+)\.", name) for name in self._change}
        if not all(numbers.values()):
            return False
        index = {name: int(found[1]) for name, found in numbers.items() if found}
        for values in self._lists:
            kinds = [{str(values[index[name]]) for name in index if (name in deaf) is each} for each in (True, False)]
            if not kinds[0] & kinds[1]:
                return True
        return False


def _lists_by_layer(config: Any) -> list[list[Any]]:
    """Return the values of a config that are lists with an entry per layer."""
    values = text_config(config).to_dict()
    return [v for v in values.values() if isinstance(v, list) and len(v) == values.get("num_hidden_layers")]
