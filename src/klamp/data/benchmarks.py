"""Benchmarks by name: where each is on the hub or in a local folder, its shape, its size, and its usual instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from klamp.data.shapes import Shape, body_and_question, joined, of_solution
from klamp.data.sources import SUFFIXES
from klamp.errors import UserError, did_you_mean

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Split:
    """A split: its name here (train or test), its name on the hub, and the rows that are expected there."""

    name: str
    hub: str
    rows: int


@dataclass(frozen=True)
class Benchmark:
    """A published set of problems. One without a split ``train`` is for evaluation only.

    ``instruction`` is put after each problem unless another is asked for; ``distinct``: rows with the same prompt and
    answer are one; ``origin`` says who made it and its licence as the hub states it.
    """

    name: str
    hub: str
    splits: tuple[Split, ...]
    shape: Shape
    origin: str
    config: str | None = None
    instruction: str = BOXED
    reward: str = "math"
    distinct: bool = False

    def split(self, asked: str | None, purpose: str) -> Split:
        """The split that is named, else the one of the purpose. Raises UserError where there is none."""
        known = {split.name: split for split in self.splits}
        if asked is not None and asked not in known:
            raise UserError(f"{self.name} has no split {asked!r}; {did_you_mean(asked, known)}")
        if purpose == "train" and "train" not in known:
            usable = [one.name for one in BENCHMARKS.values() if any(split.name == "train" for split in one.splits)]
            raise UserError(
                f"{self.name} is for evaluation only and is not trained on: klamp eval --data {self.name}; to train on: "
                f"{', '.join(usable)}, or a file of your own by its path"
            )
        if asked is None and purpose not in known:
            raise UserError(f"{self.name} has only the split {', '.join(known)}; say --split {next(iter(known))}")
        return known[asked or purpose]

    def local(self, folder: Path, split: Split) -> Path:
        """The file or folder below ``folder`` with that split. Raises UserError with the paths that were tried."""
        stems = [f"{self.name}_{split.name}", f"{self.name}-{split.name}", f"{self.name}/{split.name}"]
        # a file without a split's name may hold both, so none of it is trained on
        stems += [self.name] if len(self.splits) == 1 or split.name == "test" else []
        tried = [folder / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
        found = next((path for path in [*tried, folder / self.name] if path.exists()), None)
        if found is not None:
            return found
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {str(folder)!r} (--data-dir); without --data-dir it is {self.hub} on the hub"
            )
        shown = ", ".join(f"{stem}{{{','.join(SUFFIXES)}}}" for stem in stems)
        raise UserError(
            f"{self.name} is not in {folder}: tried {shown} and the folder {self.name}/; a file with another name is "
            "given by its path"
        )


def _only(hub: str, rows: int) -> tuple[Split, ...]:
    return (Split("test", hub, rows),)


_PROBLEM = Shape(("problem",), "answer")
_QUESTION = Shape(("question",), "answer")
_TABLE = (
    Benchmark("aime24", "HuggingFaceH4/aime_2024", _only("train", 30), _PROBLEM,
              "AIME I and II of 2024, problems of the Mathematical Association of America"),
    Benchmark("aime25", "math-ai/aime25", _only("test", 30), _PROBLEM,
              "AIME I and II of 2025, problems of the Mathematical Association of America"),
    Benchmark("aime26", "math-ai/aime26", _only("test", 30), _PROBLEM,
              "AIME I and II of 2026, problems of the Mathematical Association of America"),
    Benchmark("amc23", "math-ai/amc23", _only("test", 40), _QUESTION,
              "AMC 12 of 2023, problems of the Mathematical Association of America, answers as integers"),
    Benchmark("math500", "HuggingFaceH4/MATH-500", _only("test", 500), _PROBLEM,
              "500 problems of MATH's test split, chosen in arXiv 2305.20050; MATH is MIT"),
    Benchmark("math", "DigitalLearningGmbH/MATH-lighteval", (Split("train", "train", 7500), Split("test", "test", 5000)),
              Shape(("problem",), "solution", final=of_solution), "MATH, arXiv 2103.03874, MIT"),
    Benchmark("gsm8k", "openai/gsm8k", (Split("train", "train", 7473), Split("test", "test", 1319)), _QUESTION,
              "arXiv 2110.14168, MIT", config="main"),
    Benchmark("minerva", "math-ai/minervamath", _only("test", 272), _QUESTION,
              "problems of MIT OpenCourseWare, arXiv 2206.14858"),
    Benchmark("olympiadbench", "Hothan/OlympiadBench", _only("train", 674),
              Shape(("question",), "final_answer", read_answer=joined),
              "English competition maths, text only, of arXiv 2402.14008, Apache-2.0", config="OE_TO_maths_en_COMP"),
    Benchmark("svamp", "ChilleD/SVAMP", (Split("train", "train", 700), Split("test", "test", 300)),
              Shape(("Body", "Question"), "Answer", read_prompt=body_and_question), "arXiv 2103.07191, MIT"),
    Benchmark("mawps", "MU-NLPC/Calc-mawps", (Split("train", "train", 1089), Split("test", "test", 520)),
              Shape(("question",), "result"), "MAWPS (Koncel-Kedziorski et al., 2016) as filtered by Calc-X, MIT"),
    Benchmark("dapo-math-17k", "BytedTsinghua-SIA/DAPO-Math-17k", (Split("train", "train", 1_791_700),),
              Shape(("prompt",), "reward_model.ground_truth"),
              "arXiv 2503.14476, Apache-2.0; each row is there about a hundred times, and its prompt has an instruction",
              instruction="", distinct=True),
)  # fmt: skip
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({one.name: one for one in _TABLE})


def benchmark(source: str | None) -> Benchmark | None:
    """The benchmark of that name, unless it is a path that exists: a path is what it is."""
    if source is None or source not in BENCHMARKS or Path(source).exists():
        return None
    return BENCHMARKS[source]
