"""tinker: loss_fn and loss_fn_config of forward_backward. Thresholds are absolute ratios; the loss is a sum."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_BOUNDS = {"loss_fn_config.clip_low_threshold": "=low", "loss_fn_config.clip_high_threshold": "=high"}

TINKER = Framework(
    name="tinker",
    title="tinker",
    version="tinker-cookbook at 9dfcc3a2 (2026-08-19) and the documentation's pages; the server's losses are not public",
    syntax="python",
    call="training_client.forward_backward",
    base={},
    forms={
        "clip": ways(
            Way({"loss_fn": "importance_sampling"}, needs=("no bounds",)),
            Way({"loss_fn": "ppo"} | _BOUNDS),
        ),
        "capped_weight": ways(Way({"loss_fn": "cispo"} | _BOUNDS)),
        "plain + k2_to_rollout": ways(Way({"loss_fn": "dro", "loss_fn_config.beta": "=beta"})),
    },
    means={"token_sum": ways(Way(notes=("the advantages you send carry the mean: A / tokens of the step is a token mean",)))},
    anchors={"rollout": {}},
    corrections={},
    penalties={},
    hook="forward_backward_custom(data, fn(data, logprobs_list) -> (loss, metrics)): one more forward pass",
    related={"kl": "the cookbook puts a KL to the base model into the advantages (kl_penalty_coef)"},
    notes=("the cookbook's advantages are centred per group and not divided by a deviation",),
    traps=(
        "clip_low_threshold and clip_high_threshold are absolute (0.8 and 1.2 by default; cispo [0, 4])",
        "importance_sampling has no bound at all",
    ),
)  # fmt: skip
