"""``klamp audit``: what any constraint would have done to a run whose tokens were logged, and what is wrong with the log."""
