import pytest

from megarl.data.sampler import DataOrder


def stream(order, num_steps):
    return [item for step in range(num_steps) for item in order.batch(step)]


@pytest.mark.parametrize(("num_items", "batch_size"), [(12, 4), (11, 4), (3, 7), (1, 1)])
def test_each_epoch_holds_every_item_once(num_items, batch_size):
    items = stream(DataOrder(num_items, batch_size, seed=5), num_steps=num_items * 3)
    epochs = [items[start : start + num_items] for start in range(0, len(items), num_items)]
    assert len(epochs) == 3 * batch_size
    assert all(sorted(epoch) == list(range(num_items)) for epoch in epochs)


def test_epochs_and_seeds_differ():
    items = stream(DataOrder(97, 97, seed=5), 2)
    assert items[:97] != items[97:] != list(range(97))
    assert items != stream(DataOrder(97, 97, seed=6), 2)


def test_the_order_of_a_seed_stays_the_same_over_releases():
    assert stream(DataOrder(7, 3, seed=2), 4) == [5, 6, 2, 3, 4, 0, 1, 4, 2, 0, 3, 6]


def test_without_shuffle_the_file_is_read_in_order():
    order = DataOrder(5, 3, seed=0, shuffle=False)
    assert [order.batch(step) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_epochs_are_passes_complete_at_the_end_of_a_step():
    order = DataOrder(5, 2, seed=0)
    assert [order.epochs(step) for step in range(3)] == [0.4, 0.8, 1.2]
    # Five steps drew 7 items before the batch size changed.
    assert DataOrder(5, 2, seed=0, first_step=5, num_drawn=7).epochs(5) == 1.8
