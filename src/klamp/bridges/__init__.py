"""Bridges: the loss of a spec inside other frameworks' trainers. Each room imports its framework while it loads."""
