"""verl 0.9.1: its registered advantage estimators, against ``klamp.advantages``."""

from __future__ import annotations

from typing import Any

from conformance.rows import DIFFERS, NOT_EXPRESSIBLE, Row

_CASES = ("plain-0", "plain-1", "plain-2", "plain-3")


def _of(
    name: str, spec: str, label: str = "", cases: tuple[str, ...] = _CASES, status: str = "equal", **call: Any
) -> Row:
    more = {key: call.pop(key) for key in ("sentence", "adjust", "visible") if key in call}
    call = {"advantage": name, **call}
    return Row(f"{name}{label}", (f"advantage {name}",), call, spec, status, cases=cases, kind="verl.advantage", **more)


def _outside(name: str, sentence: str) -> Row:
    return Row(name, (f"advantage {name}",), {}, "", NOT_EXPRESSIBLE, sentence, kind="verl.advantage")


_WHITENED = {
    "sentence": "verl whitens with Bessel's factor n / (n - 1) in float32: 1e-8 apart.", "adjust": "bessel_in_float32",
    "visible": 1e-10,
}  # fmt: skip
_PLAIN = {"arguments": {"norm_adv_by_std_in_grpo": False}}
ROWS: tuple[Row, ...] = (
    _of("grpo", 'estimator("grpo", framework="verl")'),
    _of(
        "grpo", 'estimator("grpo", framework="verl")', ", a group of one", ("alone-0", "alone-1"), DIFFERS,
        sentence="verl adds 1e-6 to a float32 1, which is 1.00000095: 4e-8 apart.", adjust="alone_in_float32",
    ),
    _of("grpo", 'estimator("dr_grpo", framework="verl")', ", norm_adv_by_std_in_grpo=False", **_PLAIN),
    _of(
        "grpo_vectorized", 'estimator("grpo", framework="verl")', status=DIFFERS,
        sentence="verl takes mean and standard deviation in float32, whatever the rewards are.", adjust="group_in_float32",
    ),
    _of("gdpo", 'estimator("gdpo", framework="verl")', status=DIFFERS, **_WHITENED),
    _of("grpo_passk", 'estimator("passk", framework="verl")', cases=("untied-0", "untied-1", "untied-2")),
    _of("reinforce_plus_plus", 'estimator("reinforce_plus_plus", framework="verl")', status=DIFFERS, **_WHITENED),
    _of(
        "reinforce_plus_plus", 'estimator("reinforce_plus_plus", framework="verl", discount=0.9)', ", gamma=0.9",
        status=DIFFERS, config={"gamma": 0.9}, **_WHITENED,
    ),
    _of(
        "reinforce_plus_plus_baseline", 'estimator("reinforce_plus_plus_baseline", framework="verl")', status=DIFFERS,
        **_WHITENED,
    ),
    _of("rloo", 'estimator("rloo", framework="verl")'),
    _of("rloo", 'estimator("rloo", framework="verl")', ", a group of one", ("alone-0", "alone-1")),
    _of("rloo_vectorized", 'estimator("rloo", framework="verl")'),
    _of("opo", 'estimator("opo", framework="verl")'),
    _of(
        "gpg", 'estimator("gpg", framework="verl")', cases=("plain-0",), status=DIFFERS,
        sentence="verl has the share of rewards that are not 0 in float32: 2e-8 apart.", adjust="share_in_float32",
    ),
    _outside("gae", "It needs a value network, whose training is outside the policy loss; its result is an advantage per token."),
    _outside("remax", "It needs the reward of a greedy rollout of each prompt; its result, reward less baseline, is an input."),
    _outside("optimal_token_baseline", "It needs the sum of squared probabilities of the vocabulary at each token."),
    _outside("tir_optimal_token_baseline", "As optimal_token_baseline, over the turns of a conversation."),
)  # fmt: skip
