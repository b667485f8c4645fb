"""Checks of a request's model settings against the service's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.service.messages.requests import LoraSettings
from megarl.service.refusals import UserError
from megarl.service.trainer import ServedModel


def check_base(served: ServedModel, name: str | None) -> None:
    if name != served.name:
        raise UserError(f"base_model = {name!s:.100}: this service has {served.name}")


def check_adapters(served: ServedModel, lora: LoraSettings | None) -> None:
    """Raise UserError unless a client's adapters have the service's rank and modules."""
    if lora is None:
        raise UserError("lora_config is missing: this service trains LoRA adapters only")
    if lora.rank != served.rank:
        raise UserError(f"lora_config.rank = {lora.rank}: the adapters of this service have rank {served.rank}")
    module_choices = (
        ("train_mlp", lora.train_mlp, served.trains_mlp),
        ("train_attn", lora.train_attn, served.trains_attention),
    )
    for name, value, is_trained in module_choices:
        if value != is_trained:
            raise UserError(
                f"lora_config.{name} = {value}: in this service it is {is_trained} (lora.targets of its recipe)"
            )


def check_record(served: ServedModel, record: Mapping[str, Any], path: str) -> None:
    if (record["base_model"], record["rank"]) != (served.name, served.rank):
        raise UserError(
            f"path = {path}: has rank {record['rank']} and base model {record['base_model']}; this service has "
            f"rank {served.rank} and {served.name}"
        )


def check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise UserError(f"optimizer type = {kind:.50}: this service has adamw only")
