"""Log-probs and divergences over the whole vocabulary, without a tensor of size tokens x vocabulary."""

from __future__ import annotations

from klamp.kernels.divergences import bucket_divergences, divergences, partition
from klamp.kernels.head import OutOfMemory, named_memory
from klamp.kernels.logprobs import TokenLogProbs, token_logprobs

__all__ = [
    "OutOfMemory", "TokenLogProbs", "bucket_divergences", "divergences", "named_memory", "partition", "token_logprobs",
]  # fmt: skip
