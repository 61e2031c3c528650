"""prime-rl: [trainer.loss] in TOML. Two policies: the ratio is always to the sampler."""

from __future__ import annotations

from klamp.export.model import Framework, Way, ways

_L = "trainer.loss."
_IPO = {f"{_L}type": "ipo", f"{_L}ipo_threshold": "=low"}

PRIME_RL = Framework(
    name="prime-rl",
    title="prime-rl",
    version="main at 559b4477 (2026-08-21)",
    syntax="toml",
    call="",
    base={f"{_L}type": "default", f"{_L}adv_tau": 1.0, f"{_L}kl_tau": 0.0},
    forms={
        "binary_tv": ways(Way({f"{_L}dppo_mask_low": "=low", f"{_L}dppo_mask_high": "=high"})),
        "binary_tv_always": ways(Way(_IPO, needs=("one radius",))),
        "clip": ways(
            Way(
                {f"{_L}dppo_mask_low": 1.0, f"{_L}dppo_mask_high": 1.0},
                needs=("no bounds",),
                notes=("a probability cannot move by more than 1, so the mask never acts",),
            )
        ),
    },
    means={"token_mean": ways(Way())},
    anchors={"rollout": {}},
    corrections={},
    penalties={"k2_to_rollout": ways(Way({f"{_L}kl_tau": "=beta / 2"}))},
    hook=(
        "[trainer.loss] type='custom', import_path='module.function', kwargs={...}: one response at a time (trainer_logprobs, "
        "inference_logprobs, advantages, loss_mask), returns a sum over tokens"
    ),
    related={"new/old": "there is no old policy: a ratio to the sampler is the only one"},
    notes=("advantages are centred per group and not divided by a deviation",),
    traps=(
        "the default loss is a mask by binary TV at 0.2, not a ratio clip",
        "kl_tau = 0.001 is on by default: kl_tau (log new/rollout)^2, without the half, on masked-out tokens too",
        "no log-ratio is clamped; the truncation that its algorithms page describes is not in the code",
    ),
)  # fmt: skip
