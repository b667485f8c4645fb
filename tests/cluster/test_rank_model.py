"""Rows for the trainer's replicas: whole sets of sequences, no row empty; results come back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.cluster.rank_model import RankModel, Work
from megarl.cluster.row_packing import RowPacking
from megarl.cluster.shared_prefixes import SharedPrefixes
from megarl.cluster.teacher_model import TeacherRankModel
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.flops import forward_flops
from megarl.families.shape import shape_from_config
from megarl.tracking.metrics import Metric, Sum
from megarl.tracking.outcomes import Update, UpdateOutcome
from megarl.types import MegarlError, TrainingSequence

SHAPE = shape_from_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
    }
)  # fmt: skip
APPLIED = UpdateOutcome(applied=True, grad_norm=1.0, learning_rate=1e-3)
LENGTHS = [5, 2, 9, 4, 7, 3, 8, 6]
LAYOUTS = [
    pytest.param(ParallelConfig(1, 1, 1, 1), id="one rank"),
    pytest.param(ParallelConfig(2, 1, 2, 1), id="tp2 dp2"),
    pytest.param(ParallelConfig(2, 2, 2, 1), id="tp2 pp2 dp2"),
    pytest.param(ParallelConfig(1, 2, 2, 1, vpp=2), id="pp2 vpp2 dp2"),
    pytest.param(ParallelConfig(1, 2, 2, 1, cp=2, rank_permutation=(2, 4)), id="pp2 cp2 dp2, permuted"),
]


class Ranks:
    """The ranks of a replica have its first rank's rows: those that report answer with half of each token's id."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self.parallel, self.world_size = parallel, parallel.world_size
        self.calls: list[tuple[str, Sequence[Any], tuple[Any, ...]]] = []

    @property
    def rows(self) -> list[list[TokenBatch]]:
        """What each replica was given last."""
        return [rows for rows in self.calls[-1][1] if rows is not None]

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        self.calls.append((method, per_rank, args))
        results: list[Any] = []
        for rank in range(self.world_size):
            at = self.parallel.coordinates(rank)
            reports = at.tp == 0 and at.pp == self.parallel.pp - 1
            rows = per_rank[self.parallel.rank(tp=0, dp=at.dp, pp=0)]
            if method.endswith(".forward"):
                results.append([(row.token_ids / 2).astype(np.float32) for row in rows] if reports else None)
            else:
                metrics: dict[str, Metric] = {"train/tokens": Sum(sum(len(row.token_ids) for row in rows))}
                results.append(Update(APPLIED, metrics if reports else {}))
        return results


def batch(lengths: Sequence[int]) -> TokenBatch:
    """Token ids count on from sequence to sequence."""
    ends = np.cumsum(lengths)
    return TokenBatch.from_sequences(
        [TrainingSequence(np.arange(end - n, end), np.ones(n, bool)) for n, end in zip(lengths, ends, strict=True)]
    )


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("dp", "vpp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("count", [2, 4, 6, 10, 14])
async def test_any_number_of_sequences_is_answered(count: int, dp: int, vpp: int, together: int) -> None:
    parallel = ParallelConfig(tp=1, pp=2 if vpp > 1 else 1, dp=dp, rollout_tp=1, vpp=vpp)
    ranks = Ranks(parallel)
    trainer = RankModel(ranks, parallel, 64, together=together)  # type: ignore[arg-type]
    asked = [TrainingSequence(np.full(10 + i, i), np.ones(10 + i, bool)) for i in range(count)]
    asked_batch = TokenBatch.from_sequences(asked)
    found = await trainer.forward(asked_batch)
    assert found.tolist() == [i / 2 for i in range(count) for _ in range(10 + i)]
    # Sequences that are repeated to fill rows have no trained token.
    assert sum(row.loss_mask.sum() for rows in ranks.rows for row in rows) == asked_batch.loss_mask.sum()
    assert len({len(rows) for rows in ranks.rows}) == 1 and len(ranks.rows[0]) % parallel.rows_multiple == 0
    for row in (row for rows in ranks.rows for row in rows):
        numbers = row.token_ids[row.cu_seqlens[:-1]].tolist()
        assert numbers and len(row.token_ids) <= 64
        for start in range(0, len(numbers), together):
            first, *others = numbers[start : start + together]
            assert first % together == 0 and others == list(range(first + 1, first + together))


@pytest.mark.parametrize("parallel", LAYOUTS)
async def test_each_replica_is_sent_its_rows_once(parallel: ParallelConfig) -> None:
    ranks = Ranks(parallel)
    trainer = RankModel(ranks, parallel, max_tokens_per_microbatch=14, row_multiple=parallel.tp)  # type: ignore[arg-type]
    got = await replace(trainer, name="reference").forward(batch(LENGTHS))
    assert got.tolist() == (batch(LENGTHS).token_ids / 2).tolist()
    updated = await trainer.update(batch(LENGTHS))
    assert updated.metrics == {"train/tokens": Sum(sum(LENGTHS) * parallel.cp)}
    (first, given, args), (second, _, none) = ranks.calls
    assert (first, args, second, none) == ("reference.forward", (), "policy.update", (None, None, None))
    holders = [rank for rank, rows in enumerate(given) if rows is not None]
    assert holders == sorted(parallel.rank(tp=0, dp=replica, pp=0) for replica in range(parallel.dp))
    for row in (row for rows in ranks.rows for row in rows):
        padded = -(-row.lengths // parallel.sequence_multiple) * parallel.sequence_multiple
        assert -(-padded.sum() // parallel.tp) * parallel.tp <= 14
    assert len({len(rows) for rows in ranks.rows}) == 1


class FaultyRanks(Ranks):
    """Ranks that answer with one value for the token with id 12, in the third sequence."""

    def __init__(self, parallel: ParallelConfig, value: float) -> None:
        super().__init__(parallel)
        self.value = value

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        rows = per_rank[0]
        return [[np.where(row.token_ids == 12, self.value, 0.5).astype(np.float32) for row in rows]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("reward_model", "reward.model"),
        ("critic", "critic"),
        ("reference", "model.path"),
        ("teacher0", "distillation.teacher"),
    ],
)
async def test_a_value_that_is_not_finite_names_its_model(name: str, field: str, value: float) -> None:
    parallel = ParallelConfig(1, 1, 1, 1)
    has_scores = name in ("reward_model", "critic")
    shape = SHAPE.with_value_head() if has_scores else SHAPE
    model = RankModel(FaultyRanks(parallel, value), parallel, 64, name=name, shape=shape)  # type: ignore[arg-type]
    asked = batch([5, 5, 5])
    if value == -np.inf and not has_scores:
        # A token that the model cannot produce.
        assert (await model.forward(asked))[12] == -np.inf
    else:
        with pytest.raises(MegarlError, match="not finite") as caught:
            await model.forward(asked)
        assert str(caught.value).startswith(f"{field}: the model {name} computed 1 ")
        assert f"{value} in sequence 2 of 3" in str(caught.value)
    # Values of tokens that are not trained are not used.
    asked.loss_mask[12] = False
    assert not np.isfinite((await model.forward(asked))[12])


class FaultyTeachers(Ranks):
    """Ranks of a teacher. Each has `count` targets that are not finite."""

    def __init__(self, parallel: ParallelConfig, count: int) -> None:
        super().__init__(parallel)
        self.count = count

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        self.calls.append((method, per_rank, args))
        return [self.count] * self.world_size


async def test_a_teacher_s_distributions_that_are_not_finite_name_it() -> None:
    parallel = ParallelConfig(2, 1, 1, 1)
    taught = batch([5, 5, 5])
    taught.target_keys = np.column_stack([np.zeros(3, np.int64), np.arange(3)])
    for count in (0, 3):
        ranks = FaultyTeachers(parallel, count)
        teacher = TeacherRankModel(ranks, parallel, 64, name="teacher0", shape=SHAPE)  # type: ignore[arg-type]
        if not count:
            await teacher.store_targets(taught)
            continue
        with pytest.raises(MegarlError, match="not finite") as caught:
            await teacher.store_targets(taught)
        assert str(caught.value).startswith("distillation.teacher: the model teacher0 computed 6 ")


async def test_the_policy_s_values_that_are_not_finite_are_reported_by_its_update() -> None:
    parallel = ParallelConfig(1, 1, 1, 1)
    policy = RankModel(FaultyRanks(parallel, np.nan), parallel, 64, shape=SHAPE)  # type: ignore[arg-type]
    assert np.isnan((await policy.forward(batch([5, 5, 5])))[12])


async def test_rows_without_gradients_have_a_limit_of_their_own() -> None:
    parallel = ParallelConfig(1, 1, 2, 1)
    ranks = Ranks(parallel)
    policy = RankModel(ranks, parallel, 14, 28)  # type: ignore[arg-type]
    found = await policy.forward(batch(LENGTHS))
    assert found.tolist() == (batch(LENGTHS).token_ids / 2).tolist()
    assert 14 < max(len(row.token_ids) for rows in ranks.rows for row in rows) <= 28
    await policy.update(batch(LENGTHS))
    assert max(len(row.token_ids) for rows in ranks.rows for row in rows) <= 14


async def test_a_forward_pass_counts_once_and_only_the_counted_sequences() -> None:
    parallel = ParallelConfig(1, 1, 1, 1)
    policy = RankModel(Ranks(parallel), parallel, 14, shape=SHAPE)  # type: ignore[arg-type]
    lengths = batch(LENGTHS).lengths
    await policy.forward(batch(LENGTHS))
    assert policy.work.flops == pytest.approx(forward_flops(SHAPE, lengths))
    policy.work.flops = 0.0
    policy.forward_rows(batch(LENGTHS), 2)
    assert policy.work.flops == pytest.approx(forward_flops(SHAPE, lengths[:2]))


async def test_tokens_of_updates_are_the_policy_s_and_an_evaluation_counts_nothing() -> None:
    parallel = ParallelConfig(1, 1, 1, 1)
    policy = RankModel(Ranks(parallel), parallel, 14, shape=SHAPE)  # type: ignore[arg-type]
    critic = replace(policy, name="critic")
    await policy.update(batch(LENGTHS))
    of_update = replace(policy.work)
    assert of_update.update_tokens == sum(LENGTHS) and of_update.flops > 0
    await critic.update(batch(LENGTHS))
    assert policy.work == Work(sum(LENGTHS), 2 * of_update.flops)
    with policy.work.uncounted():
        await policy.forward(batch(LENGTHS))
    assert policy.work == Work(sum(LENGTHS), 2 * of_update.flops)


PROMPTS, ANSWERS = 6, 4
"""Groups of the batch below, and the answers of each."""


def groups(prompt_tokens: int = 20, answer_tokens: int = 5) -> TokenBatch:
    """Answers to one prompt after another. All tokens of the batch differ, except for copies of a prompt."""
    sequences, first = [], 0
    for _ in range(PROMPTS):
        prompt = np.arange(first, first + prompt_tokens)
        first += prompt_tokens
        for _ in range(ANSWERS):
            ids = np.concatenate([prompt, np.arange(first, first + answer_tokens)])
            first += answer_tokens
            sequences.append(TrainingSequence(ids, np.arange(len(ids)) >= prompt_tokens))
    return TokenBatch.from_sequences(sequences)


def stored_tokens(row: TokenBatch) -> int:
    # No token stands in two prompts or answers.
    return len(np.unique(row.token_ids))


@pytest.mark.parametrize("dp", [1, 2, 4])
async def test_groups_share_rows_by_their_stored_tokens(dp: int) -> None:
    parallel = ParallelConfig(1, 1, dp, 1)
    ranks = Ranks(parallel)
    policy = RankModel(ranks, parallel, 80, shape=SHAPE, packing=SharedPrefixes())  # type: ignore[arg-type]
    asked = groups()
    await policy.update(asked)
    rows = [row for replica in ranks.rows for row in replica]
    assert all(row.shares_prefixes and stored_tokens(row) <= 80 for row in rows)
    assert len({len(rows) for rows in ranks.rows}) == 1
    assert sum(len(row.token_ids) for row in rows) == len(asked.token_ids) == 600
    stored = sum(map(stored_tokens, rows))
    assert (policy.work.represented_tokens, policy.work.stored_tokens) == (600, stored)
    # Each prompt is stored once, except for one or two that several ranks need.
    assert stored <= PROMPTS * (20 + ANSWERS * 5) + 2 * 20
    apart = RankModel(Ranks(parallel), parallel, 80, shape=SHAPE)  # type: ignore[arg-type]
    await apart.update(asked)
    assert policy.work.flops + policy.work.saved_flops == pytest.approx(apart.work.flops)
    assert policy.work.saved_flops > 0.4 * apart.work.flops and apart.work.saved_flops == 0
    got = await policy.forward(asked)
    assert got.tolist() == (asked.token_ids / 2).tolist()


async def test_rows_with_little_to_share_are_packed_as_before() -> None:
    parallel = ParallelConfig(1, 1, 2, 1)
    asked = groups(prompt_tokens=1, answer_tokens=30)
    sent = []
    for packing in (RowPacking(), SharedPrefixes()):
        ranks = Ranks(parallel)
        policy = RankModel(ranks, parallel, 100, packing=packing)  # type: ignore[arg-type]
        await policy.update(asked)
        sent.append([[row.token_ids.tolist() for row in replica] for replica in ranks.rows])
        assert not any(row.shares_prefixes for replica in ranks.rows for row in replica)
    assert sent[0] == sent[1]


async def test_rows_that_cannot_share_are_counted() -> None:
    parallel = ParallelConfig(1, 1, 1, 1, cp=2)
    ranks = Ranks(parallel)
    policy = RankModel(ranks, parallel, 224, packing=SharedPrefixes("noise"))  # type: ignore[arg-type]
    await policy.update(groups())
    [rows] = ranks.rows
    assert not any(row.shares_prefixes for row in rows)
    assert 0 < policy.work.refused_rows <= len(rows) and policy.work.stored_tokens == 600


async def test_segments_with_one_history_fit_as_a_tree() -> None:
    """All segments of a sample share a row of 40 tokens: 100 tokens, of which 40 are stored."""
    parallel = ParallelConfig(1, 1, 1, 1)
    ranks, batch_of_forks = Ranks(parallel), groups()
    batch_of_forks.samples = np.repeat(np.arange(PROMPTS), ANSWERS)
    policy = RankModel(ranks, parallel, 40, keeps_samples=True, packing=SharedPrefixes())  # type: ignore[arg-type]
    await policy.update(batch_of_forks)
    assert [row.samples.tolist() for row in ranks.rows[0]] == [[number] * ANSWERS for number in range(PROMPTS)]
    apart = replace(policy, packing=RowPacking())
    with pytest.raises(MegarlError, match=r"take 100 tokens"):
        await apart.update(batch_of_forks)


SEGMENTS = [(5, 4), (3,), (6, 2, 3), (7,), (2, 2), (9,), (4, 4), (1,)]
"""Lengths of the segments of each sample."""


def of_segments() -> TokenBatch:
    segments = batch([length for lengths in SEGMENTS for length in lengths])
    segments.samples = np.repeat(np.arange(len(SEGMENTS)), [len(lengths) for lengths in SEGMENTS])
    return segments


@pytest.mark.parametrize("parallel", LAYOUTS)
async def test_segments_of_a_sample_share_a_row_where_the_loss_is_of_all_of_them(parallel: ParallelConfig) -> None:
    ranks = Ranks(parallel)
    policy = RankModel(ranks, parallel, 16, row_multiple=parallel.tp, keeps_samples=True)  # type: ignore[arg-type]
    await policy.update(of_segments())
    rows = [row.samples.tolist() for replica in ranks.rows for row in replica]
    assert sorted(sample for row in rows for sample in set(row)) == list(range(len(SEGMENTS)))
    for row in rows:
        assert [row.count(sample) for sample in dict.fromkeys(row)] == [len(SEGMENTS[n]) for n in dict.fromkeys(row)]
        assert row == sorted(row)


async def test_segments_may_part_where_each_has_a_loss_of_its_own() -> None:
    parallel = ParallelConfig(1, 1, 4, 1)
    ranks = Ranks(parallel)
    await RankModel(ranks, parallel, 9).update(of_segments())  # type: ignore[arg-type]
    homes: dict[int, set[int]] = {}
    for number, row in enumerate(row for replica in ranks.rows for row in replica):
        for sample in row.samples.tolist():
            homes.setdefault(sample, set()).add(number)
    assert max(len(rows) for rows in homes.values()) > 1


async def test_a_sample_that_no_row_holds_is_named() -> None:
    parallel = ParallelConfig(1, 1, 1, 1)
    policy = RankModel(Ranks(parallel), parallel, 10, keeps_samples=True)  # type: ignore[arg-type]
    with pytest.raises(MegarlError, match=r"^trainer.max_tokens_per_microbatch = 10: sequences 3 to 5 take 11 tokens"):
        await policy.update(of_segments())


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_replicas_part_the_ranks(parallel: ParallelConfig) -> None:
    replicas = [parallel.replica_ranks(replica) for replica in range(parallel.dp)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(parallel.world_size))
    for replica, ranks in enumerate(replicas):
        assert {parallel.coordinates(rank).dp for rank in ranks} == {replica}
        at = parallel.coordinates(ranks[0])
        assert (at.tp, at.pp, at.cp) == (0, 0, 0)
