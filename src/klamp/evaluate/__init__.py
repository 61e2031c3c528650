"""Evaluation: sampled answers to held-out questions, and numbers from them that mean what they say."""
