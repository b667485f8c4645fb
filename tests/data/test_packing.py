import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import pack
from megarl.families.flops import sequence_flops
from megarl.families.shape import planned_shape

RATIO = 65536.0


def quadratic(lengths, ratio=RATIO):
    """Costs of sequences whose attention costs as much as all else at `ratio` tokens."""
    return lengths * (1 + lengths / ratio)


def check(packing, lengths, max_tokens, num_ranks, multiple, rows_multiple=1):
    """The promises of `pack` that hold for every input."""
    assert len(packing) == num_ranks
    assert len({len(microbatches) for microbatches in packing}) == 1
    assert len(packing[0]) % rows_multiple == 0
    bins = [bin for microbatches in packing for bin in microbatches]
    assert sorted(item for bin in bins for item in bin) == list(range(len(lengths)))
    padded = [-(-length // multiple) * multiple for length in lengths]
    assert all(sum(padded[item] for item in bin) <= max_tokens for bin in bins)
    assert all(bins) or max(map(len, bins)) <= 1


def lockstep(packing, lengths):
    """Work divided by what the ranks could have done while they waited for each row's costliest microbatch."""
    cost = quadratic(np.asarray(lengths))
    loads = np.array([[cost[bin].sum() for bin in microbatches] for microbatches in packing])
    return cost.sum() / (len(packing) * loads.max(axis=0).sum())


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=40),
    num_ranks=st.integers(1, 5),
    multiple=st.sampled_from([1, 2, 8]),
    slack=st.integers(0, 200),
)
def test_promises(lengths, num_ranks, multiple, slack):
    max_tokens = 64 + slack
    packing = pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, multiple=multiple)
    check(packing, lengths, max_tokens, num_ranks, multiple)
    assert packing == pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, multiple=multiple)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_ranks", "multiple", "expected"),
    [
        pytest.param([], 8, 2, 1, [[[]], [[]]], id="nothing"),
        pytest.param([3], 8, 2, 1, [[[0]], [[]]], id="fewer sequences than ranks"),
        pytest.param([7, 5, 3, 1], 8, 2, 1, [[[0, 3]], [[1, 2]]], id="even halves"),
        pytest.param([6, 6, 6], 6, 1, 1, [[[0], [1], [2]]], id="one rank, full rows"),
        pytest.param([5, 5, 3, 3], 8, 1, 4, [[[0], [1], [2, 3]]], id="padding counts against the cap"),
    ],
)
def test_small_cases(lengths, max_tokens, num_ranks, multiple, expected):
    assert pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, multiple=multiple) == expected


def test_work_is_balanced_not_tokens():
    # Bins of equal tokens, 12 against 4 * 3, would cost 12 * 13 = 156 against 4 * 3 * 4 = 48.
    packing = pack(
        [12, 3, 3, 3, 3, 3, 3, 3, 3], max_tokens=40, num_ranks=2, costs=lambda lengths: quadratic(lengths, 1.0)
    )
    assert packing == [[[0]], [[1, 2, 3, 4, 5, 6, 7, 8]]]


DISTRIBUTIONS = {
    "mean 1k, cap 4k": (740, 0.8, 4096, 4096),
    "most are clipped": (3800, 0.6, 4096, 4096),
    "median 3k, cap 16k": (3000, 0.9, 16384, 16384),
    "median 6k, cap 32k": (6000, 0.9, 32768, 32768),
    "median 6k, cap 64k": (6000, 0.9, 32768, 65536),
}


@pytest.mark.parametrize(("median", "spread", "longest", "max_tokens"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize(("num_sequences", "seed"), [*((512, seed) for seed in (0, 1, 7, 10, 28)), (2048, 7)])
def test_ranks_seldom_wait_and_rows_are_few(median, spread, longest, max_tokens, num_sequences, seed):
    draw = np.random.default_rng(seed).lognormal(np.log(median), spread, num_sequences)
    lengths = np.clip(draw, 16, longest).astype(int).tolist()
    started = time.process_time()
    packing = pack(lengths, max_tokens=max_tokens, num_ranks=8, costs=quadratic)
    assert time.process_time() - started < 1.0
    check(packing, lengths, max_tokens, 8, 1)
    assert lockstep(packing, lengths) >= 0.99
    alone = sum(length > max_tokens / 2 for length in lengths)
    fewest = max(-(-sum(lengths) // (8 * max_tokens)), -(-alone // 8))
    assert len(packing[0]) <= fewest + 1


@pytest.mark.parametrize("rows_multiple", [2, 4])
def test_rows_in_multiples(rows_multiple):
    # Each sequence takes 24 tokens: two fit beside each other, so 20 take five rows of two ranks, rounded up.
    lengths = [17] * 20
    packing = pack(lengths, max_tokens=48, num_ranks=2, multiple=8, rows_multiple=rows_multiple)
    check(packing, lengths, 48, 2, 8, rows_multiple)
    assert len(packing[0]) == {2: 6, 4: 8}[rows_multiple]
    assert all(bin for microbatches in packing for bin in microbatches)


def test_too_few_sequences_for_the_rows_are_refused():
    with pytest.raises(
        ValueError, match="7 sequences cannot fill 8 microbatches: each of 2 ranks needs a multiple of 4"
    ):
        pack([1] * 7, max_tokens=8, num_ranks=2, rows_multiple=4)


def test_attention_within_windows_is_cheap():
    shape = planned_shape("openai/gpt-oss-120b")
    costs = sequence_flops(shape)
    longest = 32768
    price = costs(np.array([longest]))[0] / (longest * costs.token_flops)
    assert price == pytest.approx(1.47, abs=0.01)
    # One sequence of 32,768 tokens and 44 of 1,024 cost the same within their windows, so each gets a rank.
    short = round(price * longest / 1024 / (costs(np.array([1024]))[0] / (1024 * costs.token_flops)))
    packing = pack([longest, *[1024] * short], max_tokens=1 << 17, num_ranks=2, costs=costs)
    assert packing == [[[0]], [list(range(1, short + 1))]]


def test_a_sequence_above_the_cap_is_refused():
    with pytest.raises(ValueError, match="sequence 1 takes 12 tokens, but a microbatch holds at most 10"):
        pack([3, 9, 5], max_tokens=10, num_ranks=2, multiple=4)
    # A sequence may fill its microbatch.
    assert pack([3, 9, 5], max_tokens=12, num_ranks=1, multiple=4)
