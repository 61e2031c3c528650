"""Statistics: of sampled answers, where the unit is the question, and of training methods, where it is the seed.

``questions`` needs NumPy only; ``seeds`` loads SciPy inside its functions.
"""

from klamp.statistics.questions import (
    LEVEL,
    RESAMPLES,
    Estimate,
    Paired,
    exact_mcnemar,
    majority_at_k,
    over_questions,
    paired,
    pass_at_k,
)
from klamp.statistics.seeds import (
    AUTO_BCA_FROM,
    BCA_FROM,
    LEAST,
    METHODS,
    Crossed,
    Interval,
    PairedSeeds,
    crossed,
    detectable,
    holm,
    interquartile_mean,
    mean_interval,
    paired_seeds,
    probability_of_improvement,
    seeds_needed,
)

__all__ = [
    "AUTO_BCA_FROM",
    "BCA_FROM",
    "LEAST",
    "LEVEL",
    "METHODS",
    "RESAMPLES",
    "Crossed",
    "Estimate",
    "Interval",
    "Paired",
    "PairedSeeds",
    "crossed",
    "detectable",
    "exact_mcnemar",
    "holm",
    "interquartile_mean",
    "majority_at_k",
    "mean_interval",
    "over_questions",
    "paired",
    "paired_seeds",
    "pass_at_k",
    "probability_of_improvement",
    "seeds_needed",
]
