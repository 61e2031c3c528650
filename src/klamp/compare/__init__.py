"""One training setup under several specs: a grid of runs, paired by seed, and the page that compares them."""
