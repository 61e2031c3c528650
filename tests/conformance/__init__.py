"""Conformance: the presets against the losses that TRL, verl and Liger ship, run side by side."""
