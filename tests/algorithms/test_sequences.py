import pytest
import torch

from megarl.algorithms.sequences import place_at_last_tokens


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        pytest.param([0, 1, 1, 0, 1, 0, 1, 1], [0, 0, 2, 0, 3, 0, 0, 5], id="last tokens"),
        pytest.param([0, 1, 0, 1, 0, 0, 1, 0], [0, 2, 0, 3, 0, 0, 5, 0], id="what follows is not trained"),
        pytest.param([0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 3, 0, 0, 0], id="sequences without a token"),
    ],
)
def test_at_ends(mask, expected):
    found = place_at_last_tokens(
        torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0, 3, 5, 8]), torch.tensor(mask, dtype=torch.bool)
    )
    assert found.tolist() == expected
