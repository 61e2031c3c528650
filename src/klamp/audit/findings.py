"""Diagnoses: from the sums of an audit to findings, each with its evidence and what to do. One small function to each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from klamp.audit.evidence import LAGS
from klamp.audit.sums import Sums
from klamp.audit.thresholds import Thresholds
from klamp.audit.tokens import ROLES, Array
from klamp.regions import Region
from klamp.spec import Spec


@dataclass(frozen=True)
class Finding:
    """``what`` is wrong, the ``evidence`` for it, and what to ``do``."""

    name: str
    what: str
    evidence: str
    do: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """What a diagnosis looks at."""

    sums: Sums
    specs: Sequence[Spec]
    labels: Sequence[str]
    limits: Thresholds

    def fact(self, name: str) -> float:
        return self.sums.facts.get(name, 0.0)

    def share(self, part: str, whole: str) -> float:
        """One fact over another, 0 where there is nothing."""
        count = self.fact(whole)
        return self.fact(part) / count if count else 0.0


def findings(case: Case) -> list[Finding]:
    """Everything that is wrong, the gravest kind first."""
    return [found for diagnose in DIAGNOSES.values() for found in diagnose(case)]


def _percent(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def _counted(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f} ({_percent(part / whole)})"


# --- the log itself -------------------------------------------------------------------------------------------


def missing(case: Case) -> list[Finding]:
    """Responses for which the sampler recorded no log-prob at some token."""
    sampled, gone, limits = case.fact("sampled"), case.fact("missing"), case.limits
    skipped = case.fact("skipped")
    found = []
    if sampled and gone / sampled > limits.missing:
        excluded = case.fact("excluded")
        kept = f"; {excluded:,.0f} are left out of this audit, since a spec reads them" if excluded else ""
        found.append(Finding(
            "missing", "the sampler's log-probs are missing in some responses",
            f"{_counted(gone, sampled)} of the responses lack at least one{kept}",
            "exclude those responses from the loss, never fill in a 0 (it says probability 1); a NaN from the engine means that its forward pass broke",
        ))  # fmt: skip
    if skipped:
        found.append(Finding(
            "missing", "some responses have log-probs or advantages that are not finite, and were skipped",
            f"{skipped:,.0f} responses left out by --skip-bad-rows; {case.fact('responses'):,.0f} remain",
            "find the forward pass that gave NaN or infinity: masking it afterwards hides a broken step",
        ))  # fmt: skip
    return found


def positive(case: Case) -> list[Finding]:
    """Log-probs above 0."""
    found = []
    for role in ROLES:
        most = case.fact(f"positive_{role}_max")
        if most > case.limits.positive:
            found.append(Finding(
                "positive", f"logp_{role} is above 0: a probability above 1",
                f"{case.fact(f'positive_{role}'):,.0f} tokens, up to {most:.4g} nats",
                "a fill value (such as 1.0 at padding) lies under the mask, or a negated log-prob was logged; mask padding before anything is computed",
            ))  # fmt: skip
    return found


def mask(case: Case) -> list[Finding]:
    """Masks that do not count what the log says a response has."""
    found = []
    if case.fact("lengths_differ"):
        found.append(Finding(
            "mask", "masks disagree with the lengths of the responses",
            f"in {_counted(case.fact('lengths_differ'), case.fact('lengths'))} of the responses the mask counts another number of tokens",
            "make one mask from the length once, and use it in numerator and denominator alike",
        ))  # fmt: skip
    share = case.share("padded", "endings")
    if case.fact("padded") >= 3 and share > case.limits.padded:
        found.append(Finding(
            "mask", "masks count padding",
            f"{_counted(case.fact('padded'), case.fact('endings'))} of the responses looked at end in a run of one token with one log-prob, under the mask",
            "end the mask after the first end-of-sequence token",
        ))  # fmt: skip
    return found


def grid(case: Case) -> list[Finding]:
    """Log-probs in half precision."""
    found = []
    for role in ROLES:
        count = case.fact(f"grid_{role}")
        if count < case.limits.least:
            continue
        for kind, digits in (("bfloat16", 8), ("float16", 11)):
            share = case.fact(f"{kind}_{role}") / count
            if share >= case.limits.grid:
                found.append(Finding(
                    "grid", f"logp_{role} is rounded to {kind}",
                    f"{_percent(share)} of {count:,.0f} log-probs looked at have at most {digits} significant bits: a log-prob of -5 is off by up to {5 * 2.0 ** -digits:.2g} nats",
                    "compute log-probs from float32 logits and keep them in float32, for both policies alike: rounding alone moves the ratio",
                ))  # fmt: skip
                break
    return found


def shift(case: Case) -> list[Finding]:
    """Log-probs of one policy that belong to the token beside: the best lag is not 0."""
    found = []
    for role in ("old", "rollout"):
        count = case.fact(f"lag_{role}_n")
        if count < case.limits.least:
            continue
        apart = {lag: case.fact(f"lag_{role}_{lag}") / count for lag in LAGS}
        best = min(LAGS, key=lambda lag: (apart[lag], abs(lag)))
        if best and apart[best] < case.limits.shift * apart[0]:
            found.append(Finding(
                "shift", f"logp_{role} is shifted against logp_new by {best:+d} token{'s' if abs(best) > 1 else ''}",
                f"mean |difference| {apart[0]:.3g} nats as it is, {apart[best]:.3g} nats at lag {best:+d} ({count:,.0f} tokens looked at)",
                "align logits and tokens: the logits at position t give the log-prob of token t + 1",
            ))  # fmt: skip
    return found


# --- sampler against trainer ----------------------------------------------------------------------------------


def _moments(case: Case, name: str) -> tuple[float, float, float]:
    """(variance of a, variance of b, covariance) of a pair of facts."""
    n = case.fact(f"{name}_n")
    a, b = case.fact(f"{name}_a") / n, case.fact(f"{name}_b") / n
    return case.fact(f"{name}_aa") / n - a * a, case.fact(f"{name}_bb") / n - b * b, case.fact(f"{name}_ab") / n - a * b


def mismatch(case: Case) -> list[Finding]:
    """The sampler's policy is not the trainer's: another temperature, a truncated vocabulary, heavy tails."""
    n, limits = case.fact("y_n"), case.limits
    if n < limits.least or any(one.name == "shift" for one in shift(case)):
        return []
    found = []
    mean = case.fact("y_sum") / n
    spread = math.sqrt(max(case.fact("y_square") / n - mean * mean, 0.0))
    below, tails = case.share("y_off_below", "y_off"), case.share("y_far_abs", "y_abs")
    ours, _, both = _moments(case, "sampler")
    size = math.sqrt(max(ours, 0.0)) * spread
    correlation = (ours - both) / size if size > 1e-9 else 0.0  # of y = ours - theirs with ours
    if case.share("y_off", "y_n") >= limits.offset_share and max(below, 1.0 - below) >= limits.one_sided:
        found.append(Finding(
            "offset", "the sampler's probabilities are those of a truncated vocabulary" if mean < 0 else "the sampler's probabilities are too small",
            f"log(old/rollout) is {mean:+.4f} nats on average (a factor of {math.exp(max(mean, -700.0)):.3f}), spread {spread:.3f}; of the tokens that are off "
            f"{_percent(max(below, 1 - below))} are so on one side ({n:,.0f} looked at)",
            "top-p, top-k or min-p make the sampler renormalise: train with top_p=1 and top_k off, or log the mass that it kept" if mean < 0 else
            "look for a factor on the sampler's side: a penalty, a logit bias, another vocabulary",
        ))  # fmt: skip
    elif spread >= limits.spread and abs(correlation) >= limits.temperature and tails <= limits.tails:
        found.append(Finding(
            "temperature", f"the sampler is {'sharper' if correlation < 0 else 'flatter'} than the trainer's policy: another temperature",
            f"log(old/rollout) goes with log p_old (correlation {correlation:+.2f}, spread {spread:.3f} nats, {n:,.0f} tokens looked at); the sampler's log-probs "
            f"rise {both / ours:.3g} times as fast",
            "divide the trainer's logits by the sampling temperature, or log the sampler's log-probs before its temperature; a sampler that is many updates "
            "old looks alike",
        ))  # fmt: skip
    if case.fact("y_far") >= 3 and tails > limits.tails and case.share("y_far", "y_n") < 0.05:
        found.append(Finding(
            "tails", "a few tokens carry the mismatch of sampler and trainer",
            f"{_counted(case.fact('y_far'), n)} of the tokens are off by more than 1 nat and make up {_percent(tails)} of the sum of |log old/rollout|",
            "judge the mismatch by its median and by the share outside, and drop or cap such tokens: + sequence_mask(high=3.0) or a cap on old/rollout",
        ))  # fmt: skip
    return found


# --- the run --------------------------------------------------------------------------------------------------


def on_policy(case: Case) -> list[Finding]:
    """w = 1 everywhere: a region of new/old cannot act."""
    tokens, same = case.sums.total("tokens"), case.sums.total("unmoved")
    idle = [label for label, spec in zip(case.labels, case.specs, strict=True) if spec.guards and not spec.acts_at_once]
    if not tokens or same / tokens < case.limits.on_policy or (case.specs and not idle):
        return []
    which = f" ({', '.join(idle)})" if idle else ""
    return [Finding(
        "on_policy", f"new is old: a region of w = new/old cannot act{which}",
        f"w is exactly 1 at {_counted(same, tokens)} of the tokens",
        "each rollout has one optimizer step; take several (smaller batches for the same rollout), or constrain new/rollout instead. If there are "
        "several, the old log-probs are computed again at each of them: keep those of before the first",
    )]  # fmt: skip


def tied(case: Case) -> list[Finding]:
    """Groups whose advantages are all 0."""
    groups, none = case.fact("groups"), case.fact("groups_tied")
    noun = "groups"
    if groups < 8:
        groups, noun = case.fact("responses"), "responses"
        none = groups - case.fact("signal")
    if groups < 8 or none / groups <= case.limits.tied:
        return []
    return [Finding(
        "tied", "most of the batch gives no gradient",
        f"in {_counted(none, groups)} of the {noun} every advantage is 0",
        "the prompts are too easy or too hard: sample other prompts, more completions of each, or a reward with more levels",
    )]  # fmt: skip


def noise(case: Case) -> list[Finding]:
    """A region so narrow that tokens lie outside before the policy has moved."""
    tokens, square = case.sums.series("tokens"), case.sums.series("x2")
    mean = square / np.maximum(tokens, 1)
    quiet = np.argsort(mean, kind="stable")[: max(len(mean) // 4, 1)]
    if not len(quiet) or not square[quiet].sum() or tokens[quiet].sum() < case.limits.least:
        return []
    sigma = math.sqrt(float(square[quiet].sum() / tokens[quiet].sum()))
    found = []
    for index, (spec, label) in enumerate(zip(case.specs, case.labels, strict=True)):
        if not any(
            guard.ratio == "new/old" and guard.scope == "token" and isinstance(guard.region, Region)
            for guard in spec.guards
        ):
            continue
        outside = case.sums.spec_series(index, "outside_low") + case.sums.spec_series(index, "outside_high")
        share = float(outside[quiet].sum() / tokens[quiet].sum())
        if share > case.limits.noise:
            radius = _radius(spec)
            against = f", against a radius of {radius:.3g}" if radius is not None else ""
            found.append(Finding(
                "noise", f"{label} cuts noise",
                f"at the quietest quarter of the steps {_percent(share)} of the tokens are outside already; log w spreads by {sigma:.3g} there, which "
                f"alone is a k3 of {sigma * sigma / 2:.3g}{against}",
                "widen the region well above the noise (a radius of several times spread^2 / 2), or take the noise away: the same kernels, precision and "
                "batch shapes for both log-probs; stale rollouts look the same",
            ))  # fmt: skip
    return found


def _radius(spec: Spec) -> float | None:
    for guard in spec.guards:
        if isinstance(guard.region, Region) and guard.ratio == "new/old" and guard.scope == "token":
            where = guard.region.coordinates
            return None if where is None else where.radius
    return None


def _ends(values: Array, counts: Array, share: float) -> tuple[float, float] | None:
    """The mean over the first and the last share of the steps."""
    some = np.flatnonzero(counts > 0)
    k = max(int(len(some) * share), 1)
    if len(some) < 2:
        return None
    first, last = some[:k], some[-k:]
    return float(values[first].sum() / counts[first].sum()), float(values[last].sum() / counts[last].sum())


def drift(case: Case) -> list[Finding]:
    """Updates that go further and further."""
    tokens = case.sums.series("tokens") - case.sums.series("overflow")
    ends = _ends(case.sums.series("k3"), tokens, 0.25)
    if ends is None or len(tokens) < case.limits.trend_steps:
        return []
    first, last = ends
    if last <= case.limits.drift_kl or last <= case.limits.drift * max(first, 1e-12):
        return []
    return [Finding(
        "drift", "updates go further and further from the policy that sampled",
        f"KL(old||new) per token is {first:.3g} nats over the first quarter of the steps and {last:.3g} over the last",
        "lower the learning rate or the number of updates to a rollout, or narrow the region; look at gradient norms at the steps where it rises",
    )]  # fmt: skip


def entropy(case: Case) -> list[Finding]:
    """Entropy that falls to nothing or shoots up."""
    measured = case.sums.series("entropy_tokens").sum() > 0
    values = case.sums.series("entropy" if measured else "surprisal")
    counts = case.sums.series("entropy_tokens" if measured else "tokens")
    ends = _ends(values, counts, 0.1)
    if ends is None or (counts > 0).sum() < case.limits.trend_steps:
        return []
    first, last = ends
    said = f"{'entropy' if measured else 'mean -log p_old, which stands for the entropy,'} per token goes from {first:.3g} to {last:.3g} nats"
    if first > 0.02 and last < case.limits.collapse * first:
        return [Finding(
            "entropy", "entropy collapses", said,
            "the policy no longer explores: raise the upper bound (dapo), spare rare tokens (a gate by old probability), or stop earlier",
        )]  # fmt: skip
    if last > case.limits.explosion * max(first, 1e-9) and last > 0.5:
        return [Finding(
            "entropy", "entropy explodes", said,
            "the policy comes loose: check for a mismatch of sampler and trainer and for negative advantages on rare tokens; add dual_clip, or narrow the region",
        )]  # fmt: skip
    return []


def length(case: Case) -> list[Finding]:
    """Reward that goes with length."""
    n = case.fact("length_n")
    if n < case.limits.least:
        return []
    aa, bb, ab = _moments(case, "length")
    if aa < 1e-9 or bb < 1e-9 or abs(r := ab / math.sqrt(aa * bb)) < case.limits.length:
        return []
    return [Finding(
        "length", "longer responses get " + ("more" if r > 0 else "less") + " reward",
        f"correlation of length and reward {r:+.2f} over {n:,.0f} responses; mean length {case.fact('length_a') / n:,.0f} tokens",
        "see whether the length is what is learned: truncated responses that fail, or a reward that counts words; a mean over responses (dr_grpo, "
        "sequence_sum) takes the length out of the weights",
    )]  # fmt: skip


DIAGNOSES: dict[str, Callable[[Case], list[Finding]]] = {
    "missing": missing,
    "positive": positive,
    "mask": mask,
    "grid": grid,
    "shift": shift,
    "mismatch": mismatch,
    "on_policy": on_policy,
    "tied": tied,
    "noise": noise,
    "drift": drift,
    "entropy": entropy,
    "length": length,
}
