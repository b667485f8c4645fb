"""Losses and advantages equal the functions of verl, TRL and prime-rl, which are called from their checkouts.

Each option names a checkout of the library's repository. Only the functions that are compared are compiled, from their
source, so that the library need not be installed. They run on random samples in float64. A row per method: the largest
difference of losses and of gradients over all cases, relative to the largest value. The sources of August 2026 are
known to work: verl 1dda039b9, TRL f2cd57710, prime-rl 559b44772.

verl's DPPO and its covariance losses report another value with the same gradient, so only gradients are compared: it
multiplies the log-prob by a detached ratio, capped at 20 (the cases stay below). `kl_cov` and `clip_cov` choose tokens
in each microbatch by the current log-probs; in a single microbatch before the first update this is the choice of
megarl. `clip_cov` draws at random, so its cases draw every candidate.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages import maxrl, rae
from megarl.algorithms.covariance import covariances, drawn_covariance_mask, highest_covariance_mask
from megarl.algorithms.kl import k3
from megarl.algorithms.policy_losses import POLICY_LOSSES, is_sequence_loss, ratio
from megarl.algorithms.reduction import token_weights
from megarl.algorithms.sequence_masks import drop_off_policy

DURATION = {"small": "5 s of CPU time (5 cases a method)", "full": "10 s of CPU time (50 cases a method)"}
SMALL = {"cases": 5}
LIMIT = 1e-6
NUM_SAMPLES, NUM_TOKENS = 6, 12
CLIPS = {"clip_low": 0.1, "clip_high": 0.2}
OPSM_LIMIT = 0.2
COVARIANCES = {"low": 0.1, "high": 1.0}
SHARE = 0.1
DRIFT_PENALTY = 0.5

Loss = Callable[["Samples", Tensor], Tensor]
"""A loss [] of samples, by the policy's log-probs [samples, tokens]."""


class Samples(NamedTuple):
    """Random samples of equal length: float64 [samples, tokens], the advantages [samples], the mask bool."""

    policy: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor


def make_samples(case: int, moved: float) -> Samples:
    """Return the samples of a case. `moved` is the deviation of the policy's log-probs from the old ones, in nats."""
    random = torch.Generator().manual_seed(case)
    size = (NUM_SAMPLES, NUM_TOKENS)
    old = torch.rand(size, generator=random, dtype=torch.float64).clamp(min=1e-3).log()
    drift, away = (torch.randn(size, generator=random, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(size, generator=random) < 0.7
    # Libraries divide by a sample's number of tokens.
    mask[:, 0] = True
    advantages = torch.randn(NUM_SAMPLES, generator=random, dtype=torch.float64)
    return Samples((old + moved * drift).clamp(max=-1e-6), old, old + 0.3 * away, advantages, mask)


def compile_functions(file: Path, names: Sequence[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Compile functions or methods of a source file, without decorators. They see `namespace` and each other.

    Raises SystemExit if one is not in the file.
    """
    module = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = {node.name: node for node in ast.walk(module) if isinstance(node, kinds) and node.name in names}
    if missing := [name for name in names if name not in nodes]:
        raise SystemExit(f"{file}: has no function {', '.join(missing)}; give a checkout of August 2026.")
    for node in nodes.values():
        node.decorator_list = []
    content = ast.Module(body=list(nodes.values()), type_ignores=[])
    scope: dict[str, Any] = {"torch": torch, "math": math, "Optional": None, "Any": Any, **namespace}
    # Types in annotations need not exist.
    flags = __future__.annotations.compiler_flag
    exec(compile(content, str(file), "exec", flags=flags, dont_inherit=True), scope)
    return scope


def own_loss(name: str, aggregation: str, *, off_policy_limit: float | None = None, **settings: float) -> Loss:
    """Return megarl's loss of samples."""
    function = POLICY_LOSSES[name]
    of_sequences = is_sequence_loss(function)
    if off_policy_limit is not None:
        function, of_sequences = drop_off_policy(function, limit=off_policy_limit), True

    def loss(samples: Samples, policy: Tensor) -> Tensor:
        borders, mask = layout_of(samples)
        further = (borders, mask) if of_sequences else ()
        advantages = samples.advantages.repeat_interleave(NUM_TOKENS)
        of_tokens, _ = function(policy.flatten(), samples.old.flatten(), advantages, *further, **settings)
        return (weights_of(samples, aggregation) * of_tokens).sum()

    return loss


def layout_of(samples: Samples) -> tuple[Tensor, Tensor]:
    """Return the ends of the sequences, int64 [samples + 1], and the mask of their tokens, bool [samples * tokens]."""
    return torch.arange(NUM_SAMPLES + 1) * NUM_TOKENS, samples.mask.flatten()


def weights_of(samples: Samples, aggregation: str) -> Tensor:
    """Return the weights of tokens, float64 [samples * tokens]."""
    weights = token_weights(*layout_of(samples), aggregation).double()
    # The weights are rounded to float32; libraries divide in float64.
    exact = {"token_mean": 1 / int(samples.mask.sum()), "sequence_mean_token_sum": 1 / NUM_SAMPLES}
    return (weights > 0) * torch.tensor(exact[aggregation], dtype=torch.float64)


def unbiased_kl(samples: Samples, policy: Tensor) -> Tensor:
    """Return the policy gradient's loss with a KL whose gradient flows through the ratio, as in `kl_unbiased`."""
    clipped = own_loss("clipped", "token_mean", clip_low=0.2, clip_high=0.3)(samples, policy)
    divergences = ratio(policy, samples.old) * k3(policy, samples.reference)
    return clipped + 0.1 * (weights_of(samples, "token_mean") * divergences.flatten()).sum()


def own_covariance_loss(name: str, samples: Samples, policy: Tensor) -> Tensor:
    """Return the loss of `clip_cov` or `kl_cov` with the tokens that megarl chooses for a step."""
    _, mask = layout_of(samples)
    advantages = samples.advantages.repeat_interleave(NUM_TOKENS)
    parts = covariances(samples.old.flatten(), advantages, mask)
    draws = torch.zeros(len(mask), dtype=torch.float64)
    loss = -ratio(policy, samples.old).flatten() * advantages
    if name == "clip_cov":
        loss = loss * ~drawn_covariance_mask(parts, mask, draws, share=1.0, **COVARIANCES)
    else:
        is_chosen = highest_covariance_mask(parts, mask, draws, share=SHARE)
        loss = loss + DRIFT_PENALTY * is_chosen * (policy - samples.old).abs().flatten()
    return (weights_of(samples, "token_mean") * loss).sum()


def verl_losses(checkout: Path) -> Iterator[tuple[str, Loss, Loss, float, bool]]:
    """Yield a method's name, megarl's loss, verl's, the drift of the cases, and whether values are compared too."""
    tensors = checkout / "verl/utils/torch_functional.py"
    functional = SimpleNamespace(**compile_functions(tensors, ["masked_sum", "masked_mean"], {}))
    names = [
        "agg_loss",
        *(f"compute_policy_loss_{name}" for name in ("dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov")),
    ]
    scope = compile_functions(
        checkout / "verl/trainer/ppo/core_algos.py", names, {"verl_F": functional, "AlgoConfig": type(None)}
    )
    policy_loss = SimpleNamespace(
        dro_beta=0.4, clip_cov_ratio=1.0, clip_cov_lb=COVARIANCES["low"], clip_cov_ub=COVARIANCES["high"],
        kl_cov_ratio=SHARE, ppo_kl_coef=DRIFT_PENALTY,
    )  # fmt: skip

    class Config(SimpleNamespace):
        def get(self, name: str, default: float) -> float:
            return default

    def theirs(name: str, samples: Samples, policy: Tensor) -> Tensor:
        bounds = {"low": 0.1, "high": 0.2} if name.startswith("dppo") else {"low": 100.0, "high": 100.0}
        config = Config(
            clip_ratio=0.2, clip_ratio_low=bounds["low"], clip_ratio_high=bounds["high"], policy_loss=policy_loss,
            global_batch_info={},
        )  # fmt: skip
        advantages = samples.advantages[:, None].expand_as(policy)
        function = scope[f"compute_policy_loss_{name}"]
        return function(samples.old, policy, advantages, samples.mask.double(), config=config)[0]

    for name in ("dppo_tv", "dppo_kl"):
        yield name, own_loss(name, "token_mean", **CLIPS), partial(theirs, name), 0.4, False
    yield "dro", own_loss("dro", "token_mean", beta=0.4), partial(theirs, "dro"), 0.4, True
    for name in ("clip_cov", "kl_cov"):
        yield name, partial(own_covariance_loss, name), partial(theirs, name), 1e-9, False


def trl_losses(checkout: Path) -> Iterator[tuple[str, Loss, Loss, float, bool]]:
    """Yield methods of TRL's GRPOTrainer, as `verl_losses` does."""
    trainer = checkout / "trl/trainer/grpo_trainer.py"
    helpers = compile_functions(checkout / "trl/trainer/utils.py", ["nanmin", "nanmax"], {})
    names = ["_compute_loss", "get_off_policy_mask", "get_gamma_weights"]
    scope = compile_functions(trainer, names, {name: helpers[name] for name in ("nanmin", "nanmax")})
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True
    )

    def theirs(settings: Mapping[str, Any], samples: Samples, policy: Tensor) -> Tensor:
        arguments = SimpleNamespace(
            delta=None, use_bias_correction_kl=True, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        )  # fmt: skip
        fields: dict[str, Any] = dict(
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
            epsilon_low=0.2, epsilon_high=0.3, use_vllm=False, max_completion_length=NUM_TOKENS, aux_loss_enabled=False,
            model=SimpleNamespace(training=True), _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        )  # fmt: skip
        self = SimpleNamespace(
            **{**fields, **settings},
            args=arguments,
            accelerator=accelerator,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
            get_off_policy_mask=scope["get_off_policy_mask"],
            get_gamma_weights=torch.no_grad()(scope["get_gamma_weights"]),
        )
        tokens = torch.zeros_like(samples.mask, dtype=torch.int64)
        inputs = {
            "prompt_ids": tokens[:, :0], "prompt_mask": tokens[:, :0], "completion_ids": tokens,
            "completion_mask": samples.mask.double(), "advantages": samples.advantages,
            "old_per_token_logps": samples.old, "ref_per_token_logps": samples.reference,
            "num_items_in_batch": samples.mask.sum(),
        }  # fmt: skip
        return scope["_compute_loss"](self, self.model, inputs)

    def of(**settings: Any) -> Loss:
        return partial(theirs, settings)

    vespo = own_loss("vespo", "token_mean")
    yield "vespo", vespo, of(loss_type="vespo"), 0.4, True
    luspo = own_loss("gspo", "sequence_mean_token_sum", clip_low=2e-3, clip_high=2.5e-3)
    by_sequence = {"importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
    yield "luspo", luspo, of(loss_type="luspo", **by_sequence), 0.01, True
    dropping = own_loss("clipped", "token_mean", clip_low=0.2, clip_high=0.3, off_policy_limit=OPSM_LIMIT)
    yield "off_policy_limit", dropping, of(loss_type="dapo", off_policy_mask_threshold=OPSM_LIMIT), 0.6, True
    yield "kl_unbiased", unbiased_kl, of(loss_type="dapo", beta=0.1), 0.4, True


def prime_rl_losses(checkout: Path) -> Iterator[tuple[str, Loss, Loss, float, bool]]:
    """Yield prime-rl's DPPO with the penalty of Kimi K2.5, as `verl_losses` does."""
    names = ["default_loss_fn", "compute_importance_ratio_and_mismatch_kl", "_safe_mean"]
    file = checkout / "src/prime_rl/trainer/rl/loss.py"
    scope = compile_functions(file, names, {"LossOutputs": SimpleNamespace})
    config = SimpleNamespace(dppo_mask_low=0.1, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=0.3)

    def theirs(samples: Samples, policy: Tensor) -> Tensor:
        total = policy.new_zeros(())
        for number in range(NUM_SAMPLES):
            advantages = samples.advantages[number].expand(NUM_TOKENS)
            inputs = SimpleNamespace(
                trainer_logprobs=policy[number], inference_logprobs=samples.old[number], advantages=advantages,
                loss_mask=samples.mask[number], loss_weights=None,
            )  # fmt: skip
            total = total + scope["default_loss_fn"](inputs, config).loss
        return total / samples.mask.sum()

    yield "dppo_tv", own_loss("dppo_tv", "token_mean", **CLIPS, log_ratio_penalty=0.3), theirs, 0.4, True


def prime_rl_advantages(checkout: Path, num_cases: int) -> Iterator[dict[str, Any]]:
    """Yield rows of prime-rl's MaxRL and of its advantages of roles in self-play."""
    folder = checkout / "src/prime_rl/orchestrator/algo"

    def assign_advantages(trace: SimpleNamespace, advantage: float) -> None:
        trace.advantage = advantage

    namespace = {"iter_trainable_traces": lambda traces: ((None, trace) for trace in traces)}
    scopes = {
        name: compile_functions(
            folder / f"{name}.py", ["score_group"], namespace | {"assign_advantages": assign_advantages}
        )
        for name in ("max_rl", "rae")
    }
    differences: dict[str, list[Tensor]] = defaultdict(list)
    state = SimpleNamespace(decay=0.95, baselines=defaultdict(float))
    baselines = torch.zeros(2, dtype=torch.float64)
    for case in range(num_cases):
        random = torch.Generator().manual_seed(case)
        rewards = torch.rand(8, generator=random, dtype=torch.float64) * (case % 3 > 0)
        roles = torch.randint(0, 2, (8,), generator=random)
        ours = {"max_rl": maxrl(rewards, torch.zeros(8, dtype=torch.int64))}
        ours["rae"], baselines = rae(rewards, roles, baselines, role_decay=0.95)
        for name, advantages in ours.items():
            traces = [
                SimpleNamespace(reward=reward, agent=SimpleNamespace(name=role))
                for reward, role in zip(rewards.tolist(), roles.tolist(), strict=True)
            ]
            asyncio.run(scopes[name]["score_group"](state, traces))
            theirs = torch.tensor([trace.advantage for trace in traces], dtype=torch.float64)
            differences[name].append((theirs - advantages).abs().max() / theirs.abs().max().clamp(min=1))
    for name, of_cases in differences.items():
        yield row_of("prime-rl", name.replace("max_rl", "maxrl"), float(torch.stack(of_cases).max()), None)


def row_of(library: str, method: str, value: float | None, gradient: float | None) -> dict[str, Any]:
    """Return a row of the table; None stands for what is not compared."""
    differences = [difference for difference in (value, gradient) if difference is not None]
    return {
        "library": library,
        "method": method,
        "value": value,
        "gradient": gradient,
        "met": all(difference <= LIMIT for difference in differences),
    }


def compare(
    library: str, losses: Iterator[tuple[str, Loss, Loss, float, bool]], num_cases: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: the largest relative differences of values and gradients over the cases."""
    for method, ours, theirs, moved, compares_values in losses:
        differences: dict[str, list[Tensor]] = {"value": [], "gradient": []}
        for case in range(num_cases):
            samples = make_samples(case, moved)
            results = []
            for loss in (ours, theirs):
                leaf = samples.policy.clone().requires_grad_()
                value = loss(samples, leaf)
                results.append({"value": value.detach(), "gradient": torch.autograd.grad(value, leaf)[0]})
            for name, of_cases in differences.items():
                mine, other = (result[name] for result in results)
                of_cases.append((mine - other).abs().max() / other.abs().max().clamp(min=1e-3))
        # Python's max would drop a NaN; torch's returns it, and the row fails.
        worst = {name: float(torch.stack(of_cases).max()) for name, of_cases in differences.items()}
        yield row_of(library, method, worst["value"] if compares_values else None, worst["gradient"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verl", type=Path, help="checkout of github.com/verl-project/verl")
    parser.add_argument("--trl", type=Path, help="checkout of github.com/huggingface/trl")
    parser.add_argument("--prime-rl", type=Path, help="checkout of github.com/PrimeIntellect-ai/prime-rl")
    parser.add_argument("--cases", type=int, default=50, help="random cases for each method")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if not (options.verl or options.trl or options.prime_rl):
        raise SystemExit("peers: give at least one of --verl, --trl and --prime-rl, the folders of checkouts.")
    logging.captureWarnings(True)
    if options.verl:
        yield from compare("verl", verl_losses(options.verl), options.cases)
    if options.trl:
        yield from compare("TRL", trl_losses(options.trl), options.cases)
    if options.prime_rl:
        yield from compare("prime-rl", prime_rl_losses(options.prime_rl), options.cases)
        yield from prime_rl_advantages(options.prime_rl, options.cases)
