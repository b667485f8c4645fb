"""Recipe fields of the models on the ranks, for messages."""

_FIELDS = {"reference": "model.path", "critic": "critic", "reward_model": "reward.model"}


def field_of_model(name: str) -> str:
    """Unlisted names are teachers, such as teacher0."""
    return _FIELDS.get(name, "distillation.teacher")
