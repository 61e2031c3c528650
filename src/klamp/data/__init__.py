"""Data: rows with a prompt and an answer from a file, a folder, a saved dataset, the Hugging Face hub, or a benchmark's name.

Data flow one way: a source is numbered rows (``sources``, ``hub``), a shape finds prompt and answer in a row (``shapes``),
the reader keeps the good rows and counts the others (``reading``), and what is put around a prompt comes last
(``prompts``). Nothing is repaired in silence: what cannot be read is an error that names the line or the row (counted
from 1), or, where that is asked for, left out, counted and reported. Remote code is never run.
"""

from klamp.data.benchmarks import BENCHMARKS, BOXED, Benchmark, benchmark
from klamp.data.heldout import split_heldout
from klamp.data.prompts import Example, Prompting
from klamp.data.reading import BadRow, Request, Rows, load
from klamp.data.shapes import SHAPES, Shape
from klamp.data.sources import SUFFIXES

__all__ = [
    "BENCHMARKS",
    "BOXED",
    "SHAPES",
    "SUFFIXES",
    "BadRow",
    "Benchmark",
    "Example",
    "Prompting",
    "Request",
    "Rows",
    "Shape",
    "benchmark",
    "load",
    "split_heldout",
]
