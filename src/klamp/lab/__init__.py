"""The lab: enumerable worlds, theorems as functions, and what a constraint does to exploration."""
