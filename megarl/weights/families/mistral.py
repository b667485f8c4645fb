"""Mistral: a Llama by another name."""

from megarl.weights.families.llama import rules as rules
