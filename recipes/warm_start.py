"""Make a model that ships with Klamp, from nothing: a small Qwen3 that does a task, but not yet well.

    python recipes/warm_start.py --task sort --out DIR

Supervised next-token training on random problems of the training side of the task, seeded, on the CPU.
It stops early on purpose, and its learning rate does not decay: reinforcement learning needs a model that is
sometimes right, with errors that it can unlearn. (With a decay, the same reinforcement learning gains far less.)
"""

from __future__ import annotations

import argparse
import random
import string
import time
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from klamp.tasks import sort_rows, split_rows, task

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
PROBLEMS = {"sort": sort_rows, "split": split_rows}
LENGTHS = {"sort": {"steps": 180, "batch": 32}, "split": {"steps": 430, "batch": 64}}
CHARACTERS = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; any other character is ``<unk>``."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL.values(), *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )


def small_qwen3(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 with 4 layers of width 128, 0.8 million parameters, no dropout."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    seed: int,
    steps: int,
    batch: int,
    peak: float,
) -> None:
    """AdamW on the answer's tokens; the learning rate rises over 20 steps, then stays."""
    problems = PROBLEMS[name](random.Random(f"{name} warm start {seed}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01)
    start = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / 20, 1.0)
        rows = list(islice(problems, batch))
        first = len(rows[0]["prompt"])  # of the answer; all prompts of a task are as long
        tokens = tokenizer(
            [f"{row['prompt']}{row['answer']}{SPECIAL['eos_token']}" for row in rows], return_tensors="pt"
        ).input_ids
        logits = model(input_ids=tokens).logits[:, first - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, first:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 25 == 0:
            print(
                f"step {step + 1:4d}  loss {loss.item():.4f}  {time.perf_counter() - start:5.1f} s",
                flush=True,
            )


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str, *, sample: bool, repeats: int = 1
) -> float:
    """Share of held-out problems answered correctly, greedy or sampled at temperature 1."""
    asked = task(name)
    rows = asked.heldout() * repeats
    encoded = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    made = model.generate(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        max_new_tokens=asked.max_completion_length,
        **({"do_sample": True, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}),
    )
    texts = tokenizer.batch_decode(made[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)
    scores = asked.reward([row["prompt"] for row in rows], texts, answer=[row["answer"] for row in rows])
    return sum(score or 0.0 for score in scores) / len(scores)


def main() -> None:
    """Train, print the accuracy, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--task", choices=sorted(PROBLEMS), default="sort")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: as the shipped model")
    parser.add_argument("--batch", type=int, help="default: as the shipped model")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = character_tokenizer()
    model = small_qwen3(tokenizer)
    length = {name: getattr(options, name) or usual for name, usual in LENGTHS[options.task].items()}
    train(model, tokenizer, options.task, options.seed, **length, peak=options.learning_rate)
    model.eval()
    greedy = accuracy(model, tokenizer, options.task, sample=False)
    sampled = accuracy(model, tokenizer, options.task, sample=True, repeats=4)
    print(f"{model.num_parameters():,} parameters; held-out accuracy {greedy:.3f} greedy, {sampled:.3f} sampled")
    model.save_pretrained(options.out)
    character_tokenizer().save_pretrained(options.out)  # a used one would save its padding too


if __name__ == "__main__":
    main()
