import pytest
import torch

from megarl.algorithms.reduction import highest_entropy_mask

ENTROPIES = torch.tensor([9.0, 0.5, 2.0, 0.1, 2.0, 3.0, 0.0, 8.0])
MASK = torch.tensor([False, True, True, True, True, True, True, False])


@pytest.mark.parametrize(
    ("share", "kept", "threshold"),
    [
        pytest.param(0.01, [5], 3.0, id="at least one"),
        pytest.param(1 / 6, [5], 3.0, id="one of six"),
        pytest.param(0.2, [2, 4, 5], 2.0, id="rounded up, and a tie"),
        pytest.param(0.5, [2, 4, 5], 2.0, id="half"),
        pytest.param(0.6, [1, 2, 4, 5], 0.5, id="four"),
        pytest.param(1.0, [1, 2, 3, 4, 5, 6], 0.0, id="all"),
    ],
)
def test_the_tokens_of_highest_entropy(share: float, kept: list[int], threshold: float) -> None:
    found, lowest = highest_entropy_mask(ENTROPIES, MASK, share=share)
    assert (found.nonzero()[:, 0].tolist(), float(lowest)) == (kept, threshold)


def test_a_share_that_is_a_whole_number_of_tokens_takes_so_many() -> None:
    entropies = torch.arange(100.0)
    assert 0.07 * 100 > 7
    assert int(highest_entropy_mask(entropies, entropies >= 0, share=0.07)[0].sum()) == 7


def test_a_step_without_a_trained_token_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a token where `mask` is True"):
        highest_entropy_mask(ENTROPIES, MASK & False, share=0.2)
