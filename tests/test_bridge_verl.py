"""The loss of a spec as verl calls it: against ``klamp.Objective``, over verl's registry, configuration and aggregation.

Every test runs against a stub of those three, and against verl itself where it is installed (docs/verl.md says how).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl_stub
from oracles.batches import Fields
from oracles.special import rubbish, whole_fields
from running import close
from torch import Tensor

import klamp
from klamp.export import export

INSTALLED = importlib.util.find_spec("verl") is not None
WHY = "verl is not installed: docs/verl.md says how to install its core"
needs_verl = pytest.mark.skipif(not INSTALLED, reason=WHY)
only_verl = pytest.mark.parametrize("verl", [pytest.param("verl", marks=needs_verl)], indirect=True)
PAGE = (Path(__file__).parents[1] / "docs" / "verl.md").read_text()
BY_MODE = {
    "token-mean": "token_mean", "token-sum": "token_sum", "seq-mean-token-mean": "sequence_mean(rows='all')",
    "seq-mean-token-sum": "sequence_sum(divisor=1, rows='all')",
    "seq-mean-token-sum-norm": "sequence_sum(divisor=512, rows='all')",
}  # fmt: skip
RAW = {"rollout_is": "token", "rollout_is_threshold": float("inf"), "bypass_mode": False}
BYPASS = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None, "bypass_mode": True}
ALONE = [
    "atr_grpo", "cispo", "cispo_absolute", "dapo", "divergence_gate", "dppo_kl", "dppo_tv", "dr_grpo", "dro",
    "dual_clip", "fipo", "gmpo", "gpg", "grpo", "gspo", "gspo_token", "luspo", "power_clip", "ppo", "ppo_kl_penalty", "rec",
    "reinforce", "rollback", "sapo", "segment", "tis_loss", "topr", "two_sided", "vespo",
]  # fmt: skip
ROLLOUT = ["decoupled_ppo", "ipo", "ppo_lowprob_relaxed", "rollout_is"]
CORRECTIONS = ["geometric_mask", "icepop", "mis", "opsm", "sequence_mask", "tis", "vaco"]
REFUSED = ["bnpo", "clip_cov", "dppo_topk_kl", "dppo_topk_tv", "entropy_mask", "kl_cov", "m2po", "ppo_kl_adaptive", "real", "rs_k1",
           "rs_k2", "rs_k3", "truly_ppo"]  # fmt: skip


@dataclass
class Verl:
    """verl or its stub: our module, the registry that our loss is looked up in, the classes of its configuration."""

    bridge: Any
    registry: Any
    config: Any
    engine: dict[str, Any]  # what verl's own ActorConfig wants besides

    def actor(self, setting: Any, **more: Any) -> Any:
        """verl's configuration of an actor whose policy loss is a spec, or a configuration of one."""
        if isinstance(setting, str):
            setting = self.bridge.KlampLossConfig(spec=setting)
        return self.config.ActorConfig(policy_loss=setting, **self.engine, **more)

    def loss(
        self, setting: Any, fields: Fields, mode: str = "token-mean", *, actor: Any = None, weights: Tensor | None = None,
        **info: Any,
    ) -> tuple[Tensor, dict[str, float], Tensor]:  # fmt: skip
        """(loss, metrics, gradient) of one micro-batch, which is the whole step unless ``info`` says otherwise."""
        mask, rows = fields["mask"], len(fields["mask"])
        whole = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": rows}
        config = actor or self.actor(setting)
        config.global_batch_info.update(whole | {"loss_scale_factor": 512 if mode.endswith("norm") else None} | info)
        new = fields["logp_new"].clone().requires_grad_(True)
        advantages = fields["advantages"]
        value, metrics = self.registry.get_policy_loss_fn("klamp")(
            old_log_prob=fields["logp_old"], log_prob=new, response_mask=mask, loss_agg_mode=mode, config=config,
            advantages=advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape),
            rollout_is_weights=weights,
        )  # fmt: skip
        return value, metrics, torch.autograd.grad(value, new)[0]


@pytest.fixture(params=["stub", pytest.param("verl", marks=needs_verl)])
def verl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verl]:
    monkeypatch.delenv("KLAMP_SPEC", raising=False)
    sys.modules.pop("klamp.bridges.verl", None)
    engine = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4}
    if request.param == "stub":
        engine = {}
        for name, module in verl_stub.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    names = ("klamp.bridges.verl", "verl.trainer.ppo.core_algos", "verl.workers.config")
    yield Verl(*map(importlib.import_module, names), engine)
    sys.modules.pop("klamp.bridges.verl")


def ours(text: str, mode: str, fields: Fields) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of the objective over the whole step, by the mean that ``mode`` names."""
    new = fields["logp_new"].clone().requires_grad_(True)
    spec = bare(text)
    spec = klamp.Spec(spec.guards, spec.factors, spec.penalties, klamp.parse(BY_MODE[mode]).aggregate)
    names = ("logp_rollout",) if "logp_rollout" in spec.needs else ()
    more: dict[str, Any] = {name: fields[name] for name in names}
    more |= {"segment": klamp.batch.segments(fields["mask"])} if "segment" in spec.needs else {}
    out = klamp.Objective(spec)(klamp.Batch(new, fields["logp_old"], fields["advantages"], fields["mask"], **more))
    return out.loss, torch.autograd.grad(out.loss, new)[0]


def raw_weights(fields: Fields) -> Tensor:
    """old/rollout, as verl's rollout_is=token without a threshold gives it."""
    return torch.where(fields["mask"], (fields["logp_old"] - fields["logp_rollout"]).exp(), 0.0)


def bare(text: str) -> klamp.Spec:
    """The spec without its mean: verl's is then the mean."""
    spec = klamp.parse(text)
    return klamp.Spec(spec.guards, spec.factors, spec.penalties)


def text_of(name: str, mode: str = "token-mean") -> str:
    """The spec with verl's mean."""
    return " + ".join(filter(None, (str(bare(name)), BY_MODE[mode])))


# --- equal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALONE)
def test_every_preset_is_the_objective(verl: Verl, name: str) -> None:
    for seed, mode in enumerate(BY_MODE):
        fields = whole_fields(seed, 6, 9, per_token=seed % 2 == 1)
        loss, _, grad = verl.loss(text_of(name, mode), fields, mode)
        wanted, slope = ours(name, mode, fields)
        close(loss, wanted.detach())
        close(grad, slope)
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("text", ["dapo", "gspo", "dro", "dapo() + tis(high=1.1)"])
@pytest.mark.parametrize("mode", BY_MODE)
@pytest.mark.parametrize(("ranks", "pieces"), [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_any_cut_of_a_step_is_the_whole_step(verl: Verl, text: str, mode: str, ranks: int, pieces: int) -> None:
    """Gradients summed over micro-batches and averaged over ranks, as FSDP does, of pieces of unequal size."""
    fields = whole_fields(7, 14, 9)
    setting = verl.bridge.KlampLossConfig(spec=text_of(text, mode), rollout_correction=RAW)
    raw = raw_weights(fields) if "tis" in text else None
    whole = {"dp_size": ranks, "batch_num_tokens": int(fields["mask"].sum()), "global_batch_size": 14}
    loss, grad = torch.zeros((), dtype=torch.float64), torch.zeros(14, 9, dtype=torch.float64)
    for rank in torch.arange(14).tensor_split(ranks):
        for rows in rank.tensor_split(pieces):
            piece = {key: fields[key][rows] for key in ("mask", "logp_new", "logp_old", "advantages")}
            weights = None if raw is None else raw[rows]
            value, _, slope = verl.loss(setting, piece, mode, weights=weights, **whole)
            loss, grad[rows] = loss + value.detach() / ranks, slope / ranks
    wanted, own = ours(text, mode, fields)
    close(loss, wanted.detach())
    close(grad, own)


@pytest.mark.parametrize("name", [*ROLLOUT, *(f"dapo() + {name}()" for name in CORRECTIONS)])
def test_the_rollouts_log_probs_come_from_the_raw_weights(verl: Verl, name: str) -> None:
    setting = verl.bridge.KlampLossConfig(spec=text_of(name), rollout_correction=RAW)
    for seed in range(4):
        fields = whole_fields(seed, 6, 9)
        loss, _, grad = verl.loss(setting, fields, weights=raw_weights(fields))
        wanted, slope = ours(name, "token-mean", fields)
        close(loss, wanted.detach())
        close(grad, slope)
    with pytest.raises(klamp.UserError, match=r"passed no rollout_is_weights"):
        verl.loss(setting, fields)


@pytest.mark.parametrize("name", ["dapo", "gspo", "ipo", "rollout_is", "dapo() + opsm()"])
def test_bypass_mode_takes_the_ratio_to_the_rollout(verl: Verl, name: str) -> None:
    setting = verl.bridge.KlampLossConfig(spec=text_of(name), rollout_correction=BYPASS)
    fields = whole_fields(3, 6, 9)
    fields["logp_old"] = fields["logp_rollout"]  # as verl does
    loss, _, grad = verl.loss(setting, fields)
    wanted, slope = ours(name, "token-mean", fields)
    close(loss, wanted.detach())
    close(grad, slope)


@pytest.mark.parametrize("name", ["dapo", "cispo", "gspo", "dppo_tv"])
def test_a_correction_of_verls_own_multiplies(verl: Verl, name: str) -> None:
    fields = whole_fields(5, 6, 9)
    capped = torch.where(fields["mask"], (fields["logp_old"] - fields["logp_rollout"]).exp().clamp(max=1.1), torch.nan)
    loss, _, grad = verl.loss(text_of(name), fields, weights=capped)
    wanted, slope = ours(f"{text_of(name)} + tis(high=1.1)", "token-mean", fields)
    close(loss, wanted.detach())
    close(grad, slope)


def test_masked_positions_may_hold_anything(verl: Verl) -> None:
    fields = rubbish(1, True)
    clean = {key: torch.where(fields["mask"], value, 0.0) if value.shape == (6, 8) and value.is_floating_point() else value
             for key, value in fields.items()}  # fmt: skip
    for mode in BY_MODE:
        loss, metrics, grad = verl.loss(text_of("dapo", mode), fields, mode)
        wanted, same, slope = verl.loss(text_of("dapo", mode), clean, mode)
        assert torch.equal(loss, wanted)
        assert torch.equal(grad, slope)
        assert metrics == same


def test_metrics_are_numbers_by_our_names(verl: Verl) -> None:
    fields = whole_fields(2, 6, 9)
    _, metrics, _ = verl.loss(text_of("dapo"), fields)
    spec = klamp.parse("dapo")
    batch = klamp.Batch(*(fields[key] for key in ("logp_new", "logp_old", "advantages", "mask")))
    shown = klamp.Objective(spec)(batch).metrics.show()
    assert all(isinstance(value, float) for value in metrics.values())
    names = set(metrics) - {"batch/empty_rows_count"}
    assert {"guard/removed_low_share", "guard/removed_high_share", "policy/kl_old_new_mean"} < names
    for name in names:
        assert metrics[name] == pytest.approx(shown[name], rel=1e-12), name
    fields["mask"] = torch.zeros_like(fields["mask"])
    _, empty, _ = verl.loss(text_of("dapo"), fields, batch_num_tokens=5)
    assert set(empty) == set(metrics)  # the ranks exchange them by name
    assert empty["batch/empty_rows_count"] == 6.0
    assert not any(value for name, value in empty.items() if name != "batch/empty_rows_count")


def test_values_that_only_the_device_saw_are_raised(verl: Verl) -> None:
    """On CUDA a non-finite value is counted, without waiting for it, where the CPU raises at once."""
    count = klamp.tally.Tally({}, {"batch/nonfinite_count": torch.tensor(3)})
    with pytest.raises(klamp.UserError, match="3 non-finite"):
        verl.bridge._metrics(SimpleNamespace(metrics=count), torch.ones(2, 3, dtype=torch.bool), None)
    fields = whole_fields(0)
    fields["logp_new"][fields["mask"]] = torch.nan
    with pytest.raises(klamp.UserError, match="logp_new"):
        verl.loss(text_of("dapo"), fields)


# --- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_verl_does_not_pass_is_refused_when_the_loss_is_configured(verl: Verl, name: str) -> None:
    with pytest.raises(klamp.UserError, match=r"klamp export '.*' --to verl"):
        verl.bridge.KlampLossConfig(spec=f"{name}()", rollout_correction=RAW)


def test_every_preset_is_accepted_or_refused_as_the_page_says() -> None:
    written = {
        kind: re.findall(r"\w+", line) for kind, line in re.findall(r"^\| (.*?) \| `(.*?)` \|", PAGE, re.MULTILINE)
    }
    wanted = {
        "accepted": ALONE, "accepted with the rollout's log-probs": [*ROLLOUT, *CORRECTIONS], "refused": REFUSED,
    }  # fmt: skip
    assert {kind: sorted(names) for kind, names in wanted.items()} == {
        kind: sorted(names) for kind, names in written.items()
    }
    everything = {*ALONE, *ROLLOUT, *CORRECTIONS, *REFUSED, "trust_region"}
    assert everything == set(klamp.list_presets())


@pytest.mark.parametrize(("text", "correction", "message"), [
    ("dapo() + kl_reference(beta=0.1)", None, r"needs logp_ref.*verl has flags of its own for it: klamp export"),
    ("m2po()", None, r"asks the whole step first.*verl has no flags for it either"),
    ("atr_grpo(delta=cosine(0.05, 0.01, steps=400))", None, r"changes from step to step \(step\)"),
    ("atr_grpo(delta=adaptive(0.02, removed=0.01))", None, r"changes from step to step"),
    ("dapo(aggregate=prompt_mean)", None, r"averages by prompt_mean, and verl has only token_mean, "),
    ("dapo() + tis()", None, r"rollout_is_threshold=inf.*\+actor_rollout_ref.actor.policy_loss.rollout_correction='\$\{algorithm"),
    ("dapo() + tis()", RAW | {"rollout_is": "sequence"}, r"rollout_is=token"),
    ("dapo() + tis()", RAW | {"rollout_is_threshold": 2.0}, r"rollout_is_threshold=inf"),
    ("dapo() + tis()", RAW | {"rollout_is_threshold": "0.5_inf"}, r"rollout_is_threshold=inf"),
    ("dapo() + tis()", RAW | {"rollout_is_batch_normalize": True}, r"rollout_is_threshold=inf"),
    ("dapo() + tis()", BYPASS, r"old/rollout, which is 1 with algorithm.rollout_correction.bypass_mode=true"),
    ("dapo()", BYPASS | {"rollout_rs": "token_k1"}, r"rollout_rs='token_k1' has no effect"),
    ("dapo()", BYPASS | {"rollout_is": "token"}, r"rollout_is='token' has no effect"),
    ("atr_grp()", None, r"atr_grpo"),
    ("", None, r"needs a spec: .*KlampLossConfig.*KLAMP_SPEC"),
])  # fmt: skip
def test_refusals_name_what_is_possible(verl: Verl, text: str, correction: Any, message: str) -> None:
    told = {} if correction is None else {"rollout_correction": correction}
    with pytest.raises(klamp.UserError, match=f"(?s){message}"):
        verl.bridge.KlampLossConfig(spec=text, **told)


@pytest.mark.parametrize(("text", "mode", "info", "message"), [
    ("grpo()", "token-mean", {}, r"averages by sequence_mean\(\), verl by loss_agg_mode=token-mean.*loss_agg_mode=seq-mean-token-mean"),
    ("luspo()", "token-mean", {}, r"loss_agg_mode=seq-mean-token-sum,"),
    ("dr_grpo(divisor=1024)", "seq-mean-token-sum-norm", {}, r"actor.loss_scale_factor=1024"),
    ("dapo()", "seq-mean-token-sum-norm", {"loss_scale_factor": None}, r"width of each micro-batch"),
    ("dapo()", "token-mean", {"batch_num_tokens": None}, r"passed no batch_num_tokens"),
    ("dapo()", "token-mean", {"dp_size": None}, r"passed no dp_size"),
    ("gspo()", "seq-mean-token-mean", {"global_batch_size": None}, r"passed no global_batch_size"),
    ("dapo()", "token-median", {}, r"did you mean 'token-mean'"),
])  # fmt: skip
def test_a_mean_that_is_not_the_specs_is_refused(
    verl: Verl, text: str, mode: str, info: dict[str, Any], message: str
) -> None:
    with pytest.raises(klamp.UserError, match=message):
        verl.loss(text, whole_fields(0), mode, **info)


def test_a_knob_of_verls_that_does_nothing_is_refused(verl: Verl) -> None:
    with pytest.raises(klamp.UserError, match=r"clip_ratio_high=0.28 has no effect"):
        verl.loss(None, whole_fields(0), actor=verl.actor("dapo()", clip_ratio_high=0.28))


@pytest.mark.parametrize(("text", "mode"), [
    ("dapo()", "token-mean"), ("grpo()", "seq-mean-token-mean"), ("luspo()", "seq-mean-token-sum"),
    ("dr_grpo()", "seq-mean-token-sum-norm"), ("dr_grpo(divisor=512)", "seq-mean-token-sum-norm"),
])  # fmt: skip
def test_the_specs_own_mean_is_verls(verl: Verl, text: str, mode: str) -> None:
    fields = whole_fields(4, 6, 9)
    fields["mask"][:, 0] = True
    close(verl.loss(text, fields, mode)[0], ours(text, mode, fields)[0].detach())


def test_empty_responses_that_count_are_said(verl: Verl) -> None:
    fields = whole_fields(0)
    fields["mask"][1] = False
    with pytest.warns(UserWarning, match="rows=all says so"):
        verl.loss("grpo()", fields, "seq-mean-token-mean")
    assert (
        verl.loss("grpo(aggregate=sequence_mean(rows='all'))", fields, "seq-mean-token-mean")[1][
            "batch/empty_rows_count"
        ]
        == 1.0
    )


def test_the_environment_names_a_spec_too(verl: Verl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLAMP_SPEC", "dapo()")
    fields, plain = whole_fields(0), verl.config.PolicyLossConfig(loss_mode="klamp")
    for setting in (plain, verl.bridge.KlampLossConfig(), "dapo(epsilon_high=0.28)"):
        close(verl.loss(setting, fields)[0], ours("dapo", "token-mean", fields)[0].detach())
    with pytest.raises(klamp.UserError, match="differ; give one of them"):
        verl.loss("grpo()", fields)
    monkeypatch.setenv("KLAMP_SPEC", "dapo() + tis()")
    with pytest.raises(klamp.UserError, match=r"rollout_correction='\$"):
        verl.loss(plain, fields)  # verl's class fills in a correction of whole responses that nobody chose
    told = verl.config.PolicyLossConfig(loss_mode="klamp", rollout_correction=RAW)
    close(
        verl.loss(told, fields, weights=raw_weights(fields))[0],
        ours("dapo() + tis()", "token-mean", fields)[0].detach(),
    )


def test_the_configuration_is_of_this_loss(verl: Verl) -> None:
    with pytest.raises(klamp.UserError, match="loss_mode=klamp; got 'bypass_mode'"):
        verl.bridge.KlampLossConfig(loss_mode="bypass_mode", spec="dapo()")


def test_the_package_has_the_entry_point() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."verl.plugins"]\nklamp = "klamp.bridges.verl"' in text


# --- verl's own ways to it --------------------------------------------------------------------------------------


@needs_verl
@pytest.mark.parametrize(("first", "plugins", "modules"), [
    ("verl", "auto", ""), ("verl", "klamp", ""), ("verl", "none", "klamp.bridges.verl"), ("klamp.bridges.verl", "auto", ""),
    ("verl", "auto", "klamp.bridges.verl"),
])  # fmt: skip
def test_verl_finds_the_loss(tmp_path: Path, first: str, plugins: str, modules: str) -> None:
    """Through the entry point of an installed package, or the environment, whichever module is imported first."""
    info = tmp_path / "klamp-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: klamp\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nklamp = klamp.bridges.verl\n")
    source = str(Path(klamp.__file__).parents[1])
    more = {"VERL_USE_EXTERNAL_PLUGINS": plugins, "VERL_USE_EXTERNAL_MODULES": modules,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}  # fmt: skip
    code = f"import {first}, verl.trainer.ppo.core_algos as c; print('registered', c.get_policy_loss_fn('klamp').__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | more, check=False
    )
    assert "registered klamp.bridges.verl" in done.stdout, done.stderr[-2000:]


def composed(overrides: list[str]) -> Any:
    """verl's trainer configuration with overrides of the command line, resolved as its main does."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose(
            "ppo_trainer", overrides=["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", *overrides]
        )
    OmegaConf.resolve(config)
    return config


def commands() -> dict[str, list[str]]:
    """The overrides of each command of the page, as a shell splits them."""
    blocks = re.findall(r"```console\n\$ python -m verl.trainer.main_ppo (.*?)```", PAGE, re.DOTALL)
    words = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    return {next(word.partition("=")[2] for word in block if ".spec=" in word): block[:-1] for block in words}


@only_verl
@pytest.mark.parametrize("spec", commands())
def test_the_commands_of_the_page_configure_verl(verl: Verl, spec: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(commands()[spec])
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, verl.bridge.KlampLossConfig)
    assert actor.policy_loss.spec == spec.strip('"')
    fields = whole_fields(1, 6, 9)
    fields["mask"][:, 0] = True
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        fields["logp_old"] = fields["logp_rollout"]
    weights = None
    if correction.rollout_is is not None:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct

        options = {key: value for key, value in correction.items() if key.startswith("rollout_")}
        found, _, _ = correct(fields["logp_old"], fields["logp_rollout"], fields["mask"], **options)
        weights = found.batch["rollout_is_weights"]
    loss, _, grad = verl.loss(None, fields, actor.loss_agg_mode, actor=actor, weights=weights)
    wanted, slope = ours(actor.policy_loss.spec, actor.loss_agg_mode, fields)
    close(loss, wanted.detach())
    close(grad, slope)


@needs_verl
def test_the_other_settings_of_the_page_are_hydras() -> None:
    lines = re.findall(r"`(['\"]\+.*?['\"])`", PAGE)
    config = composed([word for line in lines for word in shlex.split(line)])
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.KLAMP_SPEC == "dapo()"
    assert klamp.parse(config.actor_rollout_ref.actor.policy_loss.spec) == klamp.parse("trust_region('js', 0.01)")


@only_verl
@pytest.mark.parametrize("spec", ["rollout_is(epsilon_low=0.3, epsilon_high=0.5)", "dapo()", "grpo()"])
def test_exported_flags_reach_verls_workers(verl: Verl, spec: str) -> None:
    """verl's own loss, as a worker finds it by the flags of ``klamp export``, with no code of ours."""
    from verl.utils.config import omega_conf_to_dataclass

    flags = shlex.split(export(spec, "verl").text.replace("\\\n", " "))
    config = composed(flags)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    fields = whole_fields(1, 6, 9)
    fields["mask"][:, 0] = True
    if config.algorithm.rollout_correction.bypass_mode:
        fields["logp_old"] = fields["logp_rollout"]
    new = fields["logp_new"].clone().requires_grad_(True)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=int(fields["mask"].sum()), global_batch_size=6)
    loss, _ = verl.registry.get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=fields["logp_old"], log_prob=new, response_mask=fields["mask"], loss_agg_mode=actor.loss_agg_mode,
        advantages=fields["advantages"][:, None].expand(fields["mask"].shape), config=actor, rollout_is_weights=None,
    )  # fmt: skip
    _, slope = ours(spec, actor.loss_agg_mode, fields)
    close(torch.autograd.grad(loss, new)[0], slope)


@only_verl
@pytest.mark.parametrize("mode", BY_MODE)
def test_verls_actor_calls_it(verl: Verl, mode: str) -> None:
    """The actor's whole loss, ``ppo_loss``, on its packed tensors, over three micro-batches, with its metrics."""
    pytest.importorskip("verl.workers.utils.losses", reason="verl's actor imports datasets and pillow")
    from verl.utils import tensordict_utils
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.utils.losses import ppo_loss

    fields = whole_fields(6, 6, 9)
    scale = 512 if mode.endswith("norm") else None
    actor = verl.actor(text_of("dapo", mode), loss_agg_mode=mode, loss_scale_factor=scale)
    grad, loss, found = torch.zeros(6, 9, dtype=torch.float64), 0.0, {}
    for rows in torch.arange(6).tensor_split(3):
        new = fields["logp_new"][rows].clone().requires_grad_(True)
        data, output = packed({key: fields[key][rows] for key in ("mask", "logp_old", "advantages")}, new)
        counts = {"dp_size": 1, "batch_num_tokens": int(fields["mask"].sum()), "global_batch_size": 6}
        tensordict_utils.assign_non_tensor(data, **counts)
        value, metrics = ppo_loss(actor, output, data)
        grad[rows] = torch.autograd.grad(value, new)[0]
        loss += float(value.detach())
        append_to_dict(found, metrics)
    wanted, slope = ours("dapo", mode, fields)
    close(torch.tensor(loss, dtype=torch.float64), wanted.detach())
    close(grad, slope)
    ranks = {name: Metric.aggregate_dp([metric, metric]) for name, metric in found.items()}  # of two equal ranks
    assert ranks["batch/tokens_count"] == pytest.approx(int(fields["mask"].sum()) / 3)
    assert ranks["actor/pg_loss"] == pytest.approx(float(wanted.detach()))
    assert ranks["policy/kl_old_new_mean"] > 0.0


def packed(piece: Fields, new: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """A micro-batch as verl's engine holds it, and the model's output: log-probs of prompt and response, one after another.

    The log-prob of a token stands at the position before it; a prompt is two tokens long.
    """
    from tensordict import TensorDict

    rows, width = new.shape
    ids = torch.zeros(rows, width, dtype=torch.int64)
    data = TensorDict(
        {
            "prompts": ids[:, :2], "responses": ids, "attention_mask": torch.ones(rows, width + 2, dtype=torch.int64),
            "response_mask": piece["mask"].long(), "old_log_probs": piece["logp_old"],
            "advantages": piece["advantages"][:, None].expand(rows, width).clone(),
        },
        batch_size=rows,
    )  # fmt: skip
    zeros = new.new_zeros(rows, 1)
    return data, {"log_probs": torch.cat([zeros, new, zeros], dim=1).reshape(-1)}
