"""Reading texts of any length: the tuner's forward, and what it needs to continue a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from pose_plugin.beacon import checks, ratios
from pose_plugin.beacon.cache import BeaconCache, kept_on_error
from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.layer import BeaconEmbedding, BeaconLinear
from pose_plugin.beacon.losses import CountedOutput, shift_labels, stream_loss, token_figures
from pose_plugin.beacon.stream import Reader
from pose_plugin.utils.errors import PoSEError


class Reading:
    """The forward of BeaconModel, which gives the attributes below."""

    model: Any
    router: Any
    training: bool
    condensed_since_step: int
    # For trainers that log accuracy and entropy from sums: adds num_correct_tokens, entropy_sum, num_valid_tokens to
    # the outputs of calls with labels (TRL up to 1.15 with loss_type="chunked_nll").
    report_statistics: bool = False
    _step: tuple[int, int]
    _ratio_override: ratios.Ratio | None
    _base_forward: Any
    _decoder_layers: list[Any]

    if TYPE_CHECKING:

        @property
        def disabled(self) -> bool: ...
        @property
        def attention(self) -> str: ...
        @property
        def cache_key(self) -> str: ...
        @property
        def window(self) -> ratios.Window: ...
        @property
        def active_config(self) -> BeaconConfig: ...
        @property
        def embedding(self) -> BeaconEmbedding: ...
        @property
        def active_adapters(self) -> list[str]: ...
        @property
        def probe(self) -> Any: ...

    # Ratios.

    def set_step(self, step: int) -> None:
        """Tells the step that training ratios are drawn for; every forward within it is one sample more.

        Called with the trainer's global step before each step, so that all ranks draw the same and a resumed run
        draws what the first run would have drawn. A loop that never calls it draws by the count of its forwards.
        """
        self._step = (int(step), 0)
        self.condensed_since_step = 0

    def _generator(self) -> Any:
        step, sample = self._step
        self._step = (step, sample + 1)
        return ratios.generator(self.active_config.seed, step, sample)

    def plan(self, cache: BeaconCache, tokens: int, ratio: Any = None, headroom: int | None = None) -> list[int]:
        """The ratios of a call that reads `tokens` more tokens; see `ratios.plan` for the rules and errors.

        Args:
            cache: the stream so far.
            tokens: new tokens.
            ratio: a policy for this call; None takes `condensing(…)`, then the configuration.
            headroom: tokens still to come after them, at least the configured headroom.
        """
        config = self.active_config
        draws = self.training and torch.is_grad_enabled()
        policy = ratio if ratio is not None else self._ratio_override
        if policy is None:
            policy = config.train_ratio if draws else config.ratio
        return ratios.plan(
            self.window,
            policy,
            tokens,
            pending=cache.pending,
            open_ratio=cache.open_ratio,
            memory=cache.len_memory,
            candidates=config.ratios,
            headroom=max(config.headroom, headroom or 0),
            at_least=max(cache.ratios[-1:], default=1),
            rng=self._generator if draws else None,
        )

    # Reading.

    # Each interval and each text has a layout of its own, and tracing this loop would make a graph for each. Layers
    # that were compiled by themselves still run compiled.
    @torch.compiler.disable
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        ratio: ratios.Ratio | None = None,
        ratios: Sequence[int] | None = None,
        headroom: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Reads (batch, tokens) of any length, in intervals, behind `past_key_values`.

        Args:
            input_ids: (batch, tokens); all rows have the same layout.
            attention_mask: (batch, tokens); padding on the right only, and only where no cache goes on.
            position_ids: let pass where they count the tokens, otherwise refused.
            past_key_values: a BeaconCache to continue, in place; also accepted as `cache`.
            inputs_embeds: (batch, tokens, hidden) instead of ids.
            labels: (batch, tokens), −100 where no loss is wanted; shifted once over the whole input.
            use_cache: whether the cache is returned; None: outside training.
            logits_to_keep: how many of the last tokens' logits to return; 0 for all.
            ratio: "adapt" or a fixed ratio for this call.
            ratios: one ratio for each interval that this call condenses.
            headroom: tokens still to come, for "adapt".
            kwargs: `num_items_in_batch`, `shift_labels`, `fused_lm_head` (with labels: per-token figures instead of
                logits, as TRL 1.16 asks for), and settings for the model.

        Returns:
            CausalLMOutputWithPast: loss, logits (batch, kept tokens, vocabulary), the BeaconCache. TokenOutput where
            `fused_lm_head` is true.

        Raises:
            PoSEError: it does not fit the window, or something that cannot be condensed rightly (see `checks`). The
                cache is then as it was.
        """
        cache = kwargs.pop("cache", None)
        cache = past_key_values if cache is None else cache
        if self.disabled:
            if isinstance(cache, BeaconCache):
                raise PoSEError("cache: a BeaconCache was given while the adapter is disabled; leave it out there")
            given = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                self.cache_key: cache,
                "inputs_embeds": inputs_embeds,
                "labels": labels,
                "use_cache": use_cache,
                "logits_to_keep": logits_to_keep,
            }
            return self._call(**given, **kwargs)
        checks.check_headroom(headroom)
        with kept_on_error(cache):
            return self._read(
                input_ids,
                inputs_embeds,
                attention_mask,
                position_ids,
                cache,
                labels,
                use_cache,
                logits_to_keep,
                checks.policy(ratio, ratios),
                headroom,
                kwargs,
            )

    @property
    def _call(self) -> Any:
        return self._base_forward if self._base_forward is not None else self.model

    def _read(
        self,
        ids: torch.Tensor | None,
        embedded: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Cache | None,
        labels: torch.Tensor | None,
        use_cache: bool | None,
        logits_to_keep: int | torch.Tensor,
        ratio: Any,
        headroom: int | None,
        kwargs: dict[str, Any],
    ) -> Any:
        given = checks.check_input(ids, embedded, self.embedding, self.model)
        config, tokens = self.active_config, given.shape[1]
        checks.check_attention(self.attention, config)
        if self.training and torch.is_grad_enabled():
            checks.check_checkpointing(self._decoder_layers)
            checks.check_unpacked(self.probe, "gradients")
        stream = self._continue(cache, given.shape[0])
        carries = cache is not None or use_cache is True
        padded = checks.check_mask(attention_mask, tokens, stream.tokens, carries)
        checks.check_positions(position_ids, attention_mask, tokens, stream.tokens)
        items, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        checks.check_labels("labels", labels, given.shape[:2])
        checks.check_labels("shift_labels", shifted, given.shape[:2])
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise PoSEError(f"logits_to_keep: {logits_to_keep} must be 0 (all) or how many of the last to return")
        fused = bool(kwargs.pop("fused_lm_head", False))
        given_shifted = shifted is not None
        if shifted is None and labels is not None:
            shifted = shift_labels(labels)
        return_dict = kwargs.pop("return_dict", None)
        if kwargs.pop("output_attentions", None):
            raise PoSEError("output_attentions: the intervals have attentions of different sizes; leave it out")
        extra = checks.check_extra(kwargs, tokens)
        keep = logits_to_keep if isinstance(logits_to_keep, int) else None
        chosen = self.plan(stream, tokens, ratio, headroom)
        reader = Reader(self, self._call, stream, extra, keep or None if shifted is None else None)
        reading = reader.read(ids, embedded, chosen)
        self.condensed_since_step += reading.condensed
        logits: Any = reading.all_logits()
        # A zero that a text within one interval needs, since it reads no beacon.
        zero: Any = 0
        if self.training and torch.is_grad_enabled() and not reading.condensed:
            zero = self.touch(logits)
        if fused and shifted is not None:
            cut = slice(None) if given_shifted else slice(-1)
            figures = token_figures(logits[:, cut], shifted[:, cut], items)
            figures.loss, figures.log_probs = figures.loss + zero, figures.log_probs + zero
            return figures
        loss: Any = None
        hidden: Any = reading.all_hidden()
        output_cls: Any = CausalLMOutputWithPast
        counts: dict[str, Any] = {}
        if shifted is not None:
            loss = stream_loss(self.model, logits, labels, shifted, items) + zero
            if self.report_statistics:
                output_cls, figures = CountedOutput, token_figures(logits.detach(), shifted)
                counts = {
                    "num_correct_tokens": figures.is_top1.sum(),
                    "entropy_sum": figures.entropy.sum(),
                    "num_valid_tokens": figures.label_mask.sum(),
                }
            if isinstance(logits_to_keep, int) and logits_to_keep:
                logits = logits[:, -logits_to_keep:]
        if not isinstance(logits_to_keep, int):
            logits = logits[:, logits_to_keep]
        by_default = not self.training and getattr(self.model.config, "use_cache", True)
        keeps = use_cache if use_cache is not None else (cache is not None or by_default)
        output = output_cls(loss=loss, logits=logits, hidden_states=hidden, **counts)
        if keeps and not padded:
            output[self.cache_key] = stream
        return output.to_tuple() if return_dict is False else output

    def touch(self, like: torch.Tensor) -> torch.Tensor:
        """A zero loss that depends on every beacon parameter.

        A text within one interval reads no beacon; DDP would wait for gradients that never come.
        """
        layers = [module for module in self.model.modules() if isinstance(module, BeaconLinear | BeaconEmbedding)]
        return sum((layer.touch(like) for layer in layers), like.new_zeros((), dtype=torch.float32))

    def _continue(self, cache: Cache | None, batch: int) -> BeaconCache:
        """The stream to go on with, its rows as many as the input's."""
        stream = checks.stream_of(cache)
        row = self.embedding.row().detach()[0].float()
        checks.check_origin(stream, self.signature(), row, (id(self), *self.active_adapters, self.embedding.version))
        if stream.tokens and stream.batch_size != batch:
            if batch % stream.batch_size:
                raise PoSEError(
                    f"cache: it holds {stream.batch_size} rows, the input {batch}; give a multiple of "
                    f"{stream.batch_size} rows. Beam search leaves a row a beam behind where a cache is continued in "
                    "place: pass it as cache=…, which keeps it as it was"
                )
            stream.batch_repeat_interleave(batch // stream.batch_size)  # beams, or several questions on one text
        return stream

    def signature(self) -> dict[str, Any]:
        """What a cache must have been made with to be continued here."""
        config, text = self.active_config, self.model.config.get_text_config()
        return {
            "interval": config.interval,
            "layout": config.layout,
            "mask": config.mask,
            "layers": int(text.num_hidden_layers),
            "hidden_size": int(text.hidden_size),
        }
