"""Shapes: where the prompt and the answer of a row are. A new shape is one entry of ``SHAPES``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from klamp.answers import find, plain_number
from klamp.data.sources import Record, RowError, kind, short
from klamp.errors import UserError, did_you_mean

FINAL_ANSWER = "####"  # GSM8K: the answer is what follows the last one
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # ShareGPT's names
_MISSING = object()

Prompt = str | list[dict[str, str]]


# --- readers: a value of a row to a prompt, or to a text that holds the answer ----------------------------------


def as_prompt(value: Any) -> Prompt:
    """A text, or a list of chat messages with a role and a content."""
    if value in ("", []) or (isinstance(value, str) and not value.strip()):
        raise RowError("is empty; every row needs one")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(f"is {kind(value)}; it must be a text or a list of chat messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowError(f"has a message without a text role and content: {short(message)}")
    return value


def conversation(value: Any) -> list[dict[str, str]]:
    """Messages ``{role, content}``, or ``{from, value}`` with human and gpt, as ``{role, content}``."""
    if isinstance(value, list):
        value = [
            {"role": _ROLES.get(str(one["from"]), one["from"]), "content": one.get("value")}
            if isinstance(one, dict) and "role" not in one and "from" in one
            else one
            for one in value
        ]
    found = as_prompt(value)
    if isinstance(found, str):
        raise RowError("is a text; it must be a list of messages")
    return [{"role": one["role"], "content": one["content"]} for one in found]


def question_of(value: Any) -> Prompt:
    """The messages of a conversation before the assistant's last, if it ends in one."""
    messages = conversation(value)
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not asked or asked[-1]["role"] != "user":
        raise RowError("has no user's message that is to be answered")
    return asked


def reply_of(value: Any) -> str:
    """The assistant's last message."""
    last = conversation(value)[-1]
    if last["role"] != "assistant":
        raise RowError(f"ends in a message of the {last['role']}, not in the assistant's answer")
    return last["content"]


def as_text(value: Any) -> str:
    """A text, a number or a boolean."""
    if isinstance(value, dict):
        inner = f"; one inside it is named with a dot, as in --answer-field NAME.{next(iter(value))}" if value else ""
        raise RowError(f"is an object; it must be a text or a number{inner}")
    if isinstance(value, (list, bytes)):
        raise RowError(f"is {kind(value)}; it must be a text or a number")
    return str(value)


def joined(value: Any) -> str:
    """A list of texts as one, with commas (OlympiadBench: all of them are asked for)."""
    if isinstance(value, list) and value:
        return ", ".join(as_text(one) for one in value)
    return as_text(value)


def body_and_question(value: Sequence[Any]) -> Prompt:
    """SVAMP: the story, a full stop if it has none, and the question."""
    body, question = (as_text(one).strip() for one in value)
    return as_prompt(f"{body}{'' if not body or body.endswith(('.', '?', '!')) else '.'} {question}".strip())


# --- finals: a text that holds the answer to the answer --------------------------------------------------------


def after_marks(text: str) -> str:
    """What follows the last ``####`` where there is one, else the whole text."""
    if FINAL_ANSWER not in text:
        return text
    final = text.rpartition(FINAL_ANSWER)[2].strip()
    if not final:
        raise RowError(f"has nothing after its last {FINAL_ANSWER}")
    return final


def of_solution(text: str) -> str:
    """The content of the last ``\\boxed{}`` of a worked solution, or what follows its last ``####``, or a bare number."""
    if "boxed" in text:
        found = find(text, "boxed")
        if found is None or not found.text.strip():
            raise RowError("has a \\boxed{} that is empty or cut off")
        return found.text.strip()
    if FINAL_ANSWER in text or plain_number(text.strip()) is not None:
        return after_marks(text).strip()
    raise RowError(f"has no \\boxed{{...}} and no {FINAL_ANSWER}, so its final answer is not known")


# --- shapes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Where the prompt and the answer of a row are, and how they are read.

    ``prompt`` and ``answer`` are columns, or places inside one (``reward_model.ground_truth``); ``prompt`` may be several.
    ``read_prompt`` gives a text or messages, ``read_answer`` the text that holds the answer (the worked solution, where
    there is one), ``final`` the answer in that text. Each raises RowError with the reason.
    """

    prompt: tuple[str, ...]
    answer: str
    read_prompt: Callable[[Any], Prompt] = as_prompt
    read_answer: Callable[[Any], str] = as_text
    final: Callable[[str], str] = after_marks

    def __str__(self) -> str:
        return "/".join((*self.prompt, *((self.answer,) if self.answer not in self.prompt else ())))

    @property
    def columns(self) -> set[str]:
        """The columns that become prompt and answer; a place inside a column leaves the column."""
        return {name for name in (*self.prompt, self.answer) if "." not in name}

    def fits(self, columns: Sequence[str]) -> bool:
        return all(_column(name, columns) in columns for name in (*self.prompt, self.answer))

    def read(self, row: Record) -> tuple[Prompt, str, str]:
        """(prompt, answer, worked answer) of a row. Raises RowError."""
        parts = [_part("prompt", name, row, lambda value: value) for name in self.prompt]
        whole = parts[0] if len(parts) == 1 else parts
        prompt = _part("prompt", "+".join(self.prompt), {"+".join(self.prompt): whole}, self.read_prompt)
        worked = _part("answer", self.answer, row, self.read_answer)
        answer = _part("answer", self.answer, {self.answer: worked}, self.final)
        if not answer.strip():
            raise RowError(f"the answer (column {self.answer!r}) is empty; every row needs one")
        return prompt, answer, worked


SHAPES = (
    Shape(("prompt",), "answer"),
    Shape(("question",), "answer"),
    Shape(("problem",), "answer"),
    Shape(("prompt",), "reward_model.ground_truth"),  # verl, DAPO-Math-17k
    Shape(("prompt",), "ground_truth"),
    Shape(("question",), "ground_truth"),
    Shape(("problem",), "ground_truth"),
    Shape(("problem",), "solution", final=of_solution),  # MATH
    Shape(("question",), "solution", final=of_solution),
    Shape(("question",), "final_answer", read_answer=joined),  # OlympiadBench
    Shape(("question",), "result"),  # MAWPS
    Shape(("Body", "Question"), "Answer", read_prompt=body_and_question),  # SVAMP
    Shape(("Question",), "Answer"),
    Shape(("input",), "target"),
    Shape(("messages",), "answer", read_prompt=question_of),
    Shape(("messages",), "ground_truth", read_prompt=question_of),
    Shape(("conversations",), "answer", read_prompt=question_of),
    Shape(("messages",), "messages", question_of, reply_of, of_solution),
    Shape(("conversations",), "conversations", question_of, reply_of, of_solution),
)


def detect(
    columns: Sequence[str], source: str, *, prompt: str | None = None, answer: str | None = None,
    first: Shape | None = None,
) -> Shape:  # fmt: skip
    """The first shape whose columns exist, ``first`` before the table; a field that is named replaces a shape's own.

    A named answer is read as it stands (or after ``####``), a named prompt as a text or messages.
    Raises UserError with the columns, the nearest name and the shapes that are known.
    """
    for field, option in ((prompt, "--prompt-field"), (answer, "--answer-field")):
        if field is not None and _column(field, columns) not in columns:
            raise UserError(f"{source} has no column {field!r} ({option}); {did_you_mean(field, columns)}")
    for shape in (*((first,) if first else ()), *SHAPES):
        tried: Shape = shape
        if prompt:
            tried = replace(tried, prompt=(prompt,), read_prompt=as_prompt)
        if answer:
            tried = replace(tried, answer=answer, read_answer=as_text, final=after_marks)
        if tried.fits(columns) and not ((prompt or answer) and tried.answer in tried.prompt):
            return tried
    if prompt and answer:
        raise UserError(f"{source}: {prompt!r} cannot be both the prompt and the answer; it has {list(columns)}")
    raise UserError(
        f"{source} has the columns {list(columns)}, and none of the shapes {', '.join(map(str, SHAPES))}; name them with "
        "--prompt-field and --answer-field"
    )


def _column(name: str, columns: Sequence[str]) -> str:
    """The column that a name means: itself, or the one before its first dot."""
    return name if name in columns else name.partition(".")[0]


def _part(what: str, name: str, row: Record, read: Callable[[Any], Any]) -> Any:
    where = f"the {what} (column {name!r})"
    value = _value(name, row)
    if value is _MISSING:
        raise RowError(f"{where} is null: the row has only {short(', '.join(map(str, row)))}")
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise RowError(f"{where} is null; every row needs one")
    try:
        return read(value)
    except RowError as error:
        raise RowError(f"{where} {error}") from error


def _value(name: str, row: Record) -> Any:
    if name in row or "." not in name:
        return row.get(name, _MISSING)
    head, _, rest = name.partition(".")
    inner = row.get(head, _MISSING)
    if isinstance(inner, Mapping):
        return _value(rest, inner)
    return inner if inner is _MISSING or inner is None else _MISSING
