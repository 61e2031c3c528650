"""Independent oracles, written from the mathematics. Nothing in this folder may import klamp."""
