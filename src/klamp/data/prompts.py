"""What is put around a row's prompt: a system message, an instruction after it, worked examples before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from klamp.data.shapes import Prompt
from klamp.errors import UserError

Row = dict[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """A question with a worked answer, shown before the one that is asked."""

    prompt: Prompt
    response: str


@dataclass(frozen=True)
class Prompting:
    """What is put around a prompt. With ``chat``, or where the prompt is messages already, it is messages:

        system, then each example as a user's and an assistant's message, then the prompt and the instruction on a new line;

    else it is text: system, each example (question, instruction, a new line, response) and the prompt, a blank line
    between two. An instruction that the prompt has already is not added.
    """

    system: str | None = None
    instruction: str = ""
    examples: tuple[Example, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.system or self.instruction or self.examples)

    def __call__(self, prompt: Prompt, chat: bool) -> Prompt:
        """The prompt as the model is asked. Raises UserError where the row's own messages contradict what is asked for."""
        if chat or not isinstance(prompt, str):
            return self._messages(prompt) if self or isinstance(prompt, str) else prompt
        if not self:
            return prompt
        shown = [f"{self._text(one.prompt)}\n{one.response}" for one in self.examples]
        # after examples a response begins on its own line
        asked = self._text(prompt) + ("\n" if self.examples else "")
        return "\n\n".join([*([self.system] if self.system else []), *shown, asked])

    def to_dict(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "instruction": self.instruction or None,
            "examples": [{"prompt": one.prompt, "response": one.response} for one in self.examples],
        }

    def _text(self, prompt: Prompt) -> str:
        if not isinstance(prompt, str):
            raise UserError("the examples are messages, and the prompts are texts: take both from alike data")
        return self._instructed(prompt)

    def _instructed(self, text: str) -> str:
        return text if not self.instruction or self.instruction in text else f"{text}\n{self.instruction}"

    def _messages(self, prompt: Prompt) -> Messages:
        own, asked = _parts(prompt)
        if own and self.system:
            raise UserError(
                f"a prompt has a system message of its own ({own[0]['content'][:60]!r}); leave out --system"
            )
        head = [{"role": "system", "content": self.system}] if self.system else own
        shown = []
        for one in self.examples:
            shown += [*self._last(_parts(one.prompt)[1]), {"role": "assistant", "content": one.response}]
        return [*head, *shown, *self._last(asked)]

    def _last(self, messages: Messages) -> Messages:
        """The messages with the instruction in the last, which must be the user's then."""
        if not self.instruction:
            return messages
        if not messages or messages[-1]["role"] != "user":
            raise UserError(
                "a prompt does not end in a user's message, so no instruction can be put there; --instruction ''"
            )
        return [*messages[:-1], messages[-1] | {"content": self._instructed(messages[-1]["content"])}]


def _parts(prompt: Prompt) -> tuple[Messages, Messages]:
    """(system messages at the start, the others)."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    start = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    return messages[:start], messages[start:]


def same_prompt(prompt: Prompt) -> str:
    """Prompts that are equal up to white space (and a system message) have the same text here."""
    return " ".join("\n".join(one["content"] for one in _parts(prompt)[1]).split())


def take_examples(candidates: Iterable[Example], n: int, asked: Iterable[Prompt], source: str) -> tuple[Example, ...]:
    """The first ``n`` with prompts that differ and are not asked. Raises UserError if there are fewer."""
    taken = {same_prompt(prompt) for prompt in asked}
    found: list[Example] = []
    for one in candidates:
        if len(found) == n:
            break
        if (text := same_prompt(one.prompt)) not in taken:
            taken.add(text)
            found.append(one)
    if len(found) < n:
        raise UserError(
            f"{source} has only {len(found)} examples whose prompts differ and are not asked (--few-shot {n})"
        )
    return tuple(found)


def tokens_of(tokenizer: Any, prompt: Prompt, chat: dict[str, Any] | None = None) -> int:
    """Tokens of a prompt as the model is asked, the template's own among them; ``chat``: arguments of the template."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(tokenizer(templated(tokenizer, prompt, chat), add_special_tokens=False)["input_ids"])


def templated(tokenizer: Any, messages: Any, chat: dict[str, Any] | None = None) -> str:
    """Chat messages through the model's template. Raises UserError where it has none or refuses them."""
    if not tokenizer.chat_template:
        raise UserError(
            "the rows are chats (lists of messages), and the model has no chat template; give --model one that has"
        )
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat or {})
    except Exception as error:  # a template raises what it likes
        raise UserError(f"the model's chat template cannot show the prompt: {error}") from error
    return text


def up_to(rows: Sequence[Row], limit: int | None, count: Callable[[Prompt], int]) -> tuple[list[Row], list[int]]:
    """The rows whose prompts have at most ``limit`` tokens, and the tokens of each of the others."""
    if limit is None:
        return list(rows), []
    counts = [count(row["prompt"]) for row in rows]
    kept = [row for row, tokens in zip(rows, counts, strict=True) if tokens <= limit]
    return kept, [tokens for tokens in counts if tokens > limit]
