"""Log-probs and divergences over the whole vocabulary, without a tensor of size tokens x vocabulary."""

from __future__ import annotations

from klamp.kernels.divergences import bucket_divergences, divergences, partition
from klamp.kernels.logprobs import TokenLogProbs, token_logprobs

__all__ = ["TokenLogProbs", "bucket_divergences", "divergences", "partition", "token_logprobs"]
