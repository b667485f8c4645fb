"""Several sets of Megatron's groups in one process."""

from __future__ import annotations

import pytest

from megarl.groups.megatron_ranks import RankGroups


def test_the_other_groups_are_back_after_an_error() -> None:
    from megatron.core import parallel_state

    before = parallel_state._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    groups = RankGroups()
    with pytest.raises(ValueError, match="a fault"), groups.in_place():
        parallel_state.set_tensor_model_parallel_world_size(7)
        raise ValueError("a fault")
    assert before == parallel_state._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE != 7
    with groups.in_place():
        assert parallel_state.get_tensor_model_parallel_world_size() == 7
