import pytest
import torch

from megarl.algorithms.reduction import AGGREGATIONS, token_weights

# Sequences of 3, 2, 4 and 1 tokens with 2, 0, 3 and 1 trained: three sequences count, six tokens.
CU_SEQLENS = torch.tensor([0, 3, 5, 9, 10])
MASK = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
LOSSES = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 29], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "by_sequence"),
    [
        pytest.param("token_mean", [1 / 6, 0, 1 / 6, 1 / 6], id="token_mean"),
        pytest.param("sequence_mean_token_mean", [1 / 6, 0, 1 / 9, 1 / 3], id="sequence_mean_token_mean"),
        pytest.param("sequence_mean_token_sum", [1 / 3, 0, 1 / 3, 1 / 3], id="sequence_mean_token_sum"),
        pytest.param("constant_length", [1 / 24, 0, 1 / 24, 1 / 24], id="constant_length_of_8"),
        pytest.param("sample_level", [1 / 8, 0, 1 / 12, 1 / 4], id="sample_level"),
    ],
)
def test_weights(mode, by_sequence):
    weights = token_weights(CU_SEQLENS, MASK, mode, constant_length=8)
    expected = torch.tensor(by_sequence).repeat_interleave(torch.tensor([3, 2, 4, 1])) * MASK
    torch.testing.assert_close(weights, expected)
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("mode", "by_sequence"),
    [
        pytest.param("token_mean", [1 / 6, 0, 1 / 6, 1 / 6], id="token_mean has no sequences"),
        pytest.param("sequence_mean_token_mean", [1 / 8, 0, 1 / 12, 1 / 4], id="sequence_mean_token_mean"),
        pytest.param("sequence_mean_token_sum", [1 / 4, 0, 1 / 4, 1 / 4], id="sequence_mean_token_sum"),
        pytest.param("constant_length", [1 / 32, 0, 1 / 32, 1 / 32], id="constant_length_of_8"),
        pytest.param("sample_level", [1 / 8, 0, 1 / 12, 1 / 4], id="sample_level always does"),
    ],
)
def test_masked_sequences_are_counted_where_asked(mode, by_sequence):
    weights = token_weights(CU_SEQLENS, MASK, mode, constant_length=8, count_masked_sequences=True)
    torch.testing.assert_close(weights, torch.tensor(by_sequence).repeat_interleave(torch.tensor([3, 2, 4, 1])) * MASK)


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        pytest.param("token_mean", (3 + 5 + 17 + 19 + 23 + 29) / 6, id="token_mean"),
        pytest.param("sequence_mean_token_mean", (8 / 2 + 59 / 3 + 29) / 3, id="sequence_mean_token_mean"),
        pytest.param("sequence_mean_token_sum", (8 + 59 + 29) / 3, id="sequence_mean_token_sum"),
        pytest.param("constant_length", (8 + 59 + 29) / (3 * 100), id="constant_length"),
    ],
)
def test_weighted_sum_is_the_aggregated_loss(mode, loss):
    weights = token_weights(CU_SEQLENS, MASK, mode, constant_length=100)
    assert (weights * LOSSES).sum().item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_batch_and_empty_batch_have_zero_weights(mode):
    masked = token_weights(CU_SEQLENS, torch.zeros(10, dtype=torch.bool), mode, constant_length=8)
    assert masked.tolist() == [0.0] * 10
    empty = token_weights(torch.tensor([0]), torch.zeros(0, dtype=torch.bool), mode, constant_length=8)
    assert empty.shape == (0,)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_order_of_sequences_does_not_matter(mode):
    weights = token_weights(CU_SEQLENS, MASK, mode, constant_length=8).split([3, 2, 4, 1])
    swapped = token_weights(
        torch.tensor([0, 4, 7, 8, 10]), MASK[[5, 6, 7, 8, 0, 1, 2, 9, 3, 4]], mode, constant_length=8
    )
    assert torch.equal(swapped, torch.cat([weights[2], weights[0], weights[3], weights[1]]))


@pytest.mark.parametrize(
    ("mode", "constant_length", "message"),
    [
        pytest.param("mean", 8, "aggregation = 'mean': is unknown", id="unknown_mode"),
        pytest.param("constant_length", None, "needs a positive constant_length in tokens, not None", id="no_length"),
        pytest.param("constant_length", 0, "needs a positive constant_length in tokens, not 0", id="zero_length"),
    ],
)
def test_refusals(mode, constant_length, message):
    with pytest.raises(ValueError, match=message):
        token_weights(CU_SEQLENS, MASK, mode, constant_length=constant_length)
