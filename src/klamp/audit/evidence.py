"""Evidence for the diagnoses: facts of responses, exact, and facts of tokens from a sample of responses.

Every fact is a sum that adds over parts (a name that ends in ``_max`` is a maximum). Of each part of a file some responses, evenly
spaced, are looked at token by token: at most ``SAMPLE``, and about as many as have ``TOKENS`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np

from klamp.audit.tokens import ROLES, Array, Tokens, counted, some

SAMPLE, TOKENS = 64, 1 << 12
LAGS = (-2, -1, 0, 1, 2)
OFF = 0.02  # nats: what counts as off, of old/rollout
FAR = 1.0  # nats: what counts as a tail of old/rollout
Facts = MutableMapping[str, float]


def gather(facts: Facts, tokens: Tokens) -> None:
    """Add what a part of a log says."""
    if not tokens.responses:
        return
    _responses(facts, tokens)
    count = min(SAMPLE, max(TOKENS * tokens.responses // max(tokens.size, 1), 1))
    few = tokens
    if tokens.responses > count:
        few = tokens.take(np.linspace(0, tokens.responses - 1, count).astype(np.int64))
    _grids(facts, few)
    _padding(facts, few)
    if few.logp_rollout is not None:
        _mismatch(facts, few, few.logp_old)
    _lag(facts, few)


def _responses(facts: Facts, tokens: Tokens) -> None:
    lengths = tokens.lengths if tokens.mask.all() else counted(tokens.mask, tokens.offsets)
    filled = lengths > 0
    signal = some((tokens.advantage != 0) & tokens.mask, tokens.offsets)
    facts["responses"] += int(filled.sum())
    facts["empty"] += int((~filled).sum())
    facts["signal"] += int(signal.sum())
    if tokens.missing is not None:
        facts["sampled"] += int(filled.sum())
        facts["missing"] += int((tokens.missing & filled).sum())
    if tokens.length is not None:
        facts["lengths"] += tokens.responses
        facts["lengths_differ"] += int((tokens.length != lengths).sum())
    if tokens.reward is not None:
        known = filled & np.isfinite(tokens.reward)
        _pair(facts, "length", lengths[known].astype(np.float64), tokens.reward[known].astype(np.float64))
    if tokens.group is not None:
        _groups(facts, tokens, filled, signal)


def _groups(facts: Facts, tokens: Tokens, filled: Array, signal: Array) -> None:
    """Groups of at least two responses in one part of a file, and those whose advantages are all 0."""
    assert tokens.group is not None
    group, count = np.unique(tokens.group[filled], return_inverse=True)[1], int(filled.sum())
    if not count:
        return
    _, index, counts = np.unique(tokens.step[filled] * count + group, return_inverse=True, return_counts=True)
    live = np.bincount(index, signal[filled], len(counts)) > 0
    facts["groups"] += int((counts > 1).sum())
    facts["groups_tied"] += int(((counts > 1) & ~live).sum())


def positive(facts: Facts, columns: Mapping[str, Array]) -> None:
    """Log-probs above 0, probabilities above 1, among the unmasked tokens of a block."""
    for role in ROLES:
        value = columns.get(f"logp_{role}")
        if value is not None and np.fmax.reduce(value, initial=0.0) > 0.0:  # fmax passes over what is missing
            above = value > 0.0
            facts[f"positive_{role}"] += int(above.sum())
            facts[f"positive_{role}_max"] = max(facts[f"positive_{role}_max"], float(value[above].max()))


def _grids(facts: Facts, tokens: Tokens) -> None:
    """Log-probs that fit bfloat16 (8 significant bits) or float16 (11), of those that are not 0."""
    for role in ROLES:
        value = getattr(tokens, f"logp_{role}")
        if value is None:
            continue
        some = value[tokens.mask & (value != 0) & np.isfinite(value)]
        bits = some.view(np.uint32)
        facts[f"grid_{role}"] += len(some)
        facts[f"bfloat16_{role}"] += int(((bits & 0xFFFF) == 0).sum())
        facts[f"float16_{role}"] += int(((bits & 0x1FFF) == 0).sum())


def _padding(facts: Facts, tokens: Tokens) -> None:
    """Responses that end in a run of one token, its log-prob constant, all of it counted: padding under the mask."""
    if tokens.token_ids is None or tokens.size < 2:
        return
    long = np.flatnonzero(tokens.lengths >= 3)
    facts["endings"] += len(long)
    last = tokens.offsets[1:][long] - 1
    same = np.ones(len(long), bool)
    for back in (1, 2):
        for value in (tokens.token_ids, tokens.logp_new):
            same &= value[last - back] == value[last]
        same &= tokens.mask[last - back]
    facts["padded"] += int((same & tokens.mask[last]).sum())


def _mismatch(facts: Facts, tokens: Tokens, logp: Array) -> None:
    """The sampler's log-probs against the trainer's, before the update."""
    assert tokens.logp_rollout is not None
    use = tokens.mask & np.isfinite(tokens.logp_rollout)
    ours, theirs = logp[use].astype(np.float64), tokens.logp_rollout[use].astype(np.float64)
    y = ours - theirs
    size = np.abs(y)
    _pair(facts, "sampler", ours, theirs)
    for name, value in (
        ("y_n", len(y)), ("y_sum", y.sum()), ("y_square", y @ y), ("y_abs", size.sum()), ("y_off", (size > OFF).sum()), ("y_off_below", (y < -OFF).sum()),
        ("y_far", (size > FAR).sum()), ("y_far_abs", size[size > FAR].sum()),
    ):  # fmt: skip
        facts[name] += float(value)


def _lag(facts: Facts, tokens: Tokens) -> None:
    """Mean |new_t - other_(t + lag)| of inner tokens: the smallest is at lag 0, unless one of the two is shifted."""
    for role in ("old", "rollout"):
        other = getattr(tokens, f"logp_{role}")
        if other is None:
            continue
        new = tokens.logp_new
        place = np.arange(tokens.size) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        inner = np.flatnonzero((place >= 2) & (place < np.repeat(tokens.lengths, tokens.lengths) - 2) & tokens.mask)
        values = {lag: np.abs(new[inner] - other[inner + lag]) for lag in LAGS}
        use = np.all([np.isfinite(value) for value in values.values()], axis=0) if len(inner) else np.zeros(0, bool)
        facts[f"lag_{role}_n"] += int(use.sum())
        for lag, value in values.items():
            facts[f"lag_{role}_{lag}"] += float(value[use].sum(dtype=np.float64))


def _pair(facts: Facts, name: str, a: Array, b: Array) -> None:
    """The moments of a pair, for its correlation and slope."""
    for key, value in (("n", len(a)), ("a", a.sum()), ("b", b.sum()), ("aa", a @ a), ("bb", b @ b), ("ab", a @ b)):
        facts[f"{name}_{key}"] += float(value)
