"""Tasks: the split, the reward, the tokenizer and the model that ship with the package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from klamp.errors import UserError
from klamp.tasks import HELDOUT_SIZE, SORT_DIGITS, TASKS, embedded_model, sort_rows, split_rows, task

ROOT = Path(__file__).parents[1]
SORT, SPLIT = task("sort"), task("split")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model(SORT.model))


@pytest.fixture(scope="module")
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("warm_start", ROOT / "recipes" / "warm_start.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'srot'; did you mean 'sort'\?"):
        task("srot")
    with pytest.raises(UserError, match=r"'embedded:srt'; did you mean 'embedded:sort'\?"):
        embedded_model("embedded:srt")
    with pytest.raises(UserError, match="embedded:sort"):
        embedded_model("embedded:../sort")


def test_reasoning_gym_names_are_delegated(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = pytest.importorskip("klamp.rewards")
    monkeypatch.setattr(rewards, "reasoning_gym_task", lambda name: ("made", name))
    assert task("reasoning_gym:products") == ("made", "reasoning_gym:products")


def test_a_task_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SORT.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        SORT.defaults["max_steps"] = 1  # type: ignore[index]
    assert hash(SORT) == hash(TASKS["sort"])


def test_import_is_light() -> None:
    code = "import sys, klamp.tasks as t; t.task('sort').heldout(); print(sorted(set(sys.modules) & set(sys.argv[1:])))"
    heavy = ["torch", "transformers", "trl", "datasets", "numpy"]
    made = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_train_rows_are_a_function_of_the_seed() -> None:
    first, again, other = SORT.train(0), SORT.train(0), SORT.train(1)
    assert first == again
    assert first != other
    assert len(first) == len(other) == 8192
    assert len({row["prompt"] for row in first}) == len(first)
    # also across processes and versions: the first problem is pinned
    assert first[0] == {"prompt": "9463958833=", "answer": "3334568899"}
    assert SORT.heldout()[0] == {"prompt": "4488748258=", "answer": "2444578888"}


def test_every_row_is_a_sorting_problem() -> None:
    for row in [*SORT.train(3), *SORT.heldout()]:
        digits, answer = row["prompt"].removesuffix("="), row["answer"]
        assert row.keys() == {"prompt", "answer"}
        assert row["prompt"] == digits + "="
        assert len(digits) == SORT_DIGITS
        assert sorted(digits) == list(answer)


def test_heldout_shares_no_answer_with_training_or_the_warm_start() -> None:
    heldout = SORT.heldout()
    assert heldout == SORT.heldout()
    assert len({row["prompt"] for row in heldout}) == HELDOUT_SIZE == 256
    answers = {row["answer"] for row in heldout}
    warm_start = islice(sort_rows(Random("sort warm start 0")), 180 * 32)
    for rows in (*(SORT.train(seed) for seed in range(5)), warm_start):
        assert answers.isdisjoint(row["answer"] for row in rows)


def test_the_reward_is_an_exact_match_of_the_stripped_completion() -> None:
    completions = [
        "0123",
        " 0123\n",
        "01234",
        "123",
        "",
        "0 123",
        [{"role": "assistant", "content": "0123 "}],
    ]
    count = len(completions)
    rewards = SORT.reward(
        prompts=["3210="] * count, completions=completions, answer=["0123"] * count, extra=[0] * count
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="longer than"):
        SORT.reward(prompts=["3210="], completions=["0123"], answer=["0123", "0123"])


def test_every_row_of_split_is_one_way_to_make_a_number_and_sides_share_none() -> None:
    train, heldout = SPLIT.train(3), SPLIT.heldout()
    assert train == SPLIT.train(3) != SPLIT.train(4)
    assert train[0] == {"prompt": "6914=", "answer": "5610+1304"}  # the same in every process and version
    assert len(heldout) == HELDOUT_SIZE
    for row in [*train, *heldout]:
        one, other = (int(part) for part in row["answer"].split("+"))
        assert min(one, other) >= 1000
        assert max(one, other) <= 9999
        assert row["prompt"] == f"{one + other}="
    warm_start = islice(split_rows(Random("split warm start 0")), 430 * 64)
    numbers = {row["prompt"] for row in heldout}
    for rows in (*(SPLIT.train(seed) for seed in range(3)), warm_start):
        assert numbers.isdisjoint(row["prompt"] for row in rows)


def test_any_way_to_split_a_number_is_right() -> None:
    right = ["2113+3294", " 1000+4407\n", "4407+1000", [{"role": "assistant", "content": "2113+3294"}]]
    wrong = [
        "2113+3295",
        "407+5000",
        "5000+407",
        "0407+5000",
        "2113-3294",
        "2113+3294=",
        "1000+1000+3407",
        "",
        "5407",
        "21133294",
    ]
    made = SPLIT.reward(["5407="] * 14, [*right, *wrong], answer=["2000+3407"] * 14)
    assert made == [1.0] * len(right) + [0.0] * len(wrong)
    assert SPLIT.reward(["?"], ["no"], answer=["no"]) == [0.0]  # a gold that is no sum is never met


def test_the_shipped_splitter_is_sometimes_right(recipe: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model(SPLIT.model)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = recipe.accuracy(model, tokenizer, "split", sample=True, repeats=2)
    assert 0.24 <= sampled <= 0.37
    assert 0.55 <= recipe.accuracy(model, tokenizer, "split", sample=False) <= 0.67


def test_the_defaults_are_options_of_trl_and_whole_groups() -> None:
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(use_cpu=True, bf16=False, report_to="none", **SORT.defaults)
    assert {name: getattr(config, name) for name in SORT.defaults} == dict(SORT.defaults)
    assert config.generation_batch_size % config.num_generations == 0
    assert config.max_steps % config.steps_per_generation == 0  # the last rollout is used whole
    assert config.steps_per_generation > 1  # else no trust region can act


def test_the_tokenizer_round_trips_and_marks_the_unknown(tokenizer: Any) -> None:
    text = "".join(map(chr, range(32, 127))) + "\n A  b\n\n3905112746="
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("aé\t漢b").input_ids == [
        *tokenizer("a").input_ids,
        *[tokenizer.unk_token_id] * 3,
        *tokenizer("b").input_ids,
    ]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}) == 4
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template is None
    assert tokenizer(["1", "123"], padding=True).input_ids[0][:2] == [tokenizer.pad_token_id] * 2
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_real_word_problems_encode_without_unknowns(tokenizer: Any) -> None:
    text = 'Joan found 70 seashells . She gave Sam 27 ; "how many" (in $) has she left ?'
    assert tokenizer.unk_token_id not in tokenizer(text).input_ids


def test_the_shipped_model_is_sometimes_right(tokenizer: Any, recipe: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = embedded_model(SORT.model)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.config.model_type == "qwen3"
    assert model.num_parameters() == 800_640
    assert model.config.attention_dropout == 0.0
    assert model.config.vocab_size == len(tokenizer) == 100
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = recipe.accuracy(model, tokenizer, "sort", sample=True, repeats=4)
    greedy = recipe.accuracy(model, tokenizer, "sort", sample=False)
    assert 0.30 <= sampled <= 0.45
    assert 0.55 <= greedy <= 0.70


def test_the_recipe_makes_the_shipped_tokenizer_and_architecture(recipe: Any, tmp_path: Path) -> None:
    folder = embedded_model(SORT.model)
    made = recipe.character_tokenizer()
    made.save_pretrained(tmp_path)
    recipe.small_qwen3(made).config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "config.json"):
        ours, shipped = (json.loads((path / name).read_text()) for path in (tmp_path, folder))
        for varies in ("transformers_version", "dtype", "architectures"):
            ours.pop(varies, None), shipped.pop(varies, None)
        assert ours == shipped, name
