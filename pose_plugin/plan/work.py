"""Count the floating-point operations of a training step, to compare rows of different lengths.

Per token, a linear map of p weights takes 2·p operations forward, 2·p for the gradient of its input, and 2·p for its
own gradient if it is trained. Attention over a row of n tokens takes 4·n·queries per layer forward, and twice that
backward (2.5 times if fused, as scores are computed again); causal kernels skip half of the pairs. Korthikanti et al.
(arXiv 2205.05198, appendix A) count in the same way. Gradient checkpointing computes each layer forward once more, up
to its last map.
"""

from __future__ import annotations

from pose_plugin.plan.memory import Architecture, Run


def token_operations(model: Architecture, run: Run, causal: bool = True) -> float:
    """Return the floating-point operations of training one token of a row of `run.window` tokens.

    Args:
        model: sizes; every layer counts as one that attends to the whole row.
        run: method, checkpointing, attention and window.
        causal: whether attention skips the pairs that the mask hides, as fused kernels do.
    """
    head = model.vocabulary * model.hidden
    layers = sum(rows * columns for name, (rows, columns) in model.linear.items() if name != model.head)
    if model.experts:
        # Of the experts, those that one token passes.
        layers += 3 * model.hidden * model.intermediate * model.layers
    adapter = 0 if run.method == "full" else model.lora(run.lora_rank, run.lora_targets)
    trained = layers + head if run.method == "full" else adapter
    attention = 4.0 * run.window * model.queries * model.layers * (0.5 if causal else 1)
    forward = 2.0 * (layers + adapter) + attention
    backward = 2.0 * (layers + head + adapter + trained) + attention * (2 if run.eager else 2.5)
    # Nothing needs the output of a layer's last map again.
    again = forward - 2.0 * model.layers * model.hidden * model.intermediate if run.checkpointing else 0.0
    return forward + again + 2.0 * head + backward
