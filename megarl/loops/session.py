"""What every loop works with: the ranks, the engines' answers, the tracker; and how a run begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.config import Recipe, SamplingConfig
from megarl.data.chat import load_tokenizer
from megarl.data.problems import read_problems
from megarl.evaluation import Respondents, accuracy
from megarl.parallel_layout import ParallelLayout
from megarl.platform import device
from megarl.rewards.scoring import RewardPool
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import Problem, SamplingSettings, TrainingSequence
from megarl.workers.batching import TrainerRanks
from megarl.workers.process_group import ProcessGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class Session:
    """A run under way."""

    recipe: Recipe
    layout: ParallelLayout
    folder: RunFolder
    tracker: Tracker
    tokenizer: Tokenizer
    ranks: ProcessGroup
    trainer: TrainerRanks
    respondents: Respondents
    validation: Mapping[str, list[Problem]]

    def read_problems(self, path: str) -> list[Problem]:
        """The problems of a data file, as this run renders them."""
        return _read_problems(self.recipe, self.tokenizer, path)

    async def add_logprobs(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        """The sequences with what the objective asks of the trainer before its update: old and reference log-probs."""
        algorithm = self.recipe.algorithm
        if algorithm.old_logprobs == "rollout":
            sequences = [replace(s, old_logprobs=s.rollout_logprobs) for s in sequences]
        elif self.recipe.train.updates_per_step > 1:
            old = await self.trainer.logprobs(sequences)
            sequences = [replace(s, old_logprobs=o) for s, o in zip(sequences, old, strict=True)]
        if algorithm.kl_coefficient:
            reference = await self.trainer.logprobs(sequences, of="reference")
            sequences = [replace(s, reference_logprobs=r) for s, r in zip(sequences, reference, strict=True)]
        return sequences

    async def reshard(self) -> dict[str, float]:
        """Bring the trainer's weights into the engines; the slowest rank's seconds and the bytes of all."""
        reports = await self.ranks.call("reshard")
        seconds = {
            f"time/reshard_{name}": max(r[name] for r in reports) for name in reports[0] if name.endswith("_seconds")
        }
        moved = {f"reshard/{name}": sum(r[name] for r in reports) for name in reports[0] if name.endswith("_bytes")}
        return seconds | moved

    async def evaluate(self, step: int) -> dict[str, float]:
        """`val/SET/accuracy` and what goes with it, of every validation set; the answers go to samples/."""
        scalars: dict[str, float] = {}
        sampling = sampling_settings(self.recipe.evaluation_sampling)
        with self.tracker.phase("evaluation"):
            for name, problems in self.validation.items():
                measured, answered = await accuracy(self.respondents, problems, sampling)
                scalars |= {f"val/{name}/{key}": value for key, value in measured.items()}
                self.tracker.samples(step, [{"set": name} | answer.record() for answer in answered])
        return scalars

    def evaluates_at(self, step: int) -> bool:
        """Whether a step ends with an evaluation: every so many steps, and the last."""
        every = self.recipe.evaluation.every_steps
        return bool(self.validation) and (step == self.recipe.train.steps or (every > 0 and step % every == 0))

    async def memory(self) -> dict[str, float]:
        """The largest rank's peak."""
        return {"memory/peak_gib": max(await self.ranks.call("peak_memory_bytes")) / 2**30}


def run(recipe: Recipe, layout: ParallelLayout) -> None:
    """Carry a checked recipe out, from starting its ranks to the exported model."""
    from megarl.loops import rl, sft

    loops = {"rl": rl.train, "sft": sft.train}
    with RunFolder(recipe) as folder:
        asyncio.run(_run(recipe, layout, folder, loops[recipe.loop]))


async def _run(
    recipe: Recipe, layout: ParallelLayout, folder: RunFolder, loop: Callable[[Session], Awaitable[None]]
) -> None:
    async with AsyncExitStack() as stack:
        tracker = Tracker(folder, headlines=("reward/mean", "train/loss"), steps=recipe.train.steps)
        stack.callback(tracker.close)
        rewards = RewardPool(
            recipe.reward.functions,
            num_workers=recipe.reward.num_workers,
            timeout_seconds=recipe.reward.timeout_seconds,
            correct_score=recipe.reward.correct_score,
        )
        stack.callback(rewards.close)
        tokenizer = load_tokenizer(recipe.model.path)
        validation = {name: _read_problems(recipe, tokenizer, path) for name, path in recipe.data.validation.items()}
        with tracker.phase("start"):
            ranks = await ProcessGroup.start(
                "megarl.workers.worker:Worker",
                {"recipe": recipe, "layout": layout},
                world_size=layout.world_size,
                log_folder=folder.logs_folder,
                start_timeout_seconds=recipe.cluster.start_timeout_seconds,
                environment=device.rank_environment(recipe.cluster.ranks_per_node),
            )
        stack.push_async_callback(ranks.close)
        folder.set_status("running")
        concurrent = recipe.rollout.max_concurrent_requests
        session = Session(
            recipe=recipe,
            layout=layout,
            folder=folder,
            tracker=tracker,
            tokenizer=tokenizer,
            ranks=ranks,
            trainer=TrainerRanks(ranks, layout, recipe.trainer.max_tokens_per_microbatch),
            respondents=Respondents(ranks, layout, tokenizer, rewards, max_running=2 * concurrent),
            validation={name: problems[: recipe.evaluation.max_problems] for name, problems in validation.items()},
        )
        await loop(session)
        await ranks.call("export", folder.model_folder)


def sampling_settings(config: SamplingConfig) -> SamplingSettings:
    """What a request carries of the recipe's sampling section."""
    return SamplingSettings(**config.model_dump())


def _read_problems(recipe: Recipe, tokenizer: Tokenizer, path: str) -> list[Problem]:
    data = recipe.data
    return read_problems(
        path,
        tokenizer,
        answer_field=data.answer_field,
        system_prompt=data.system_prompt,
        max_prompt_tokens=data.max_prompt_tokens,
    )
