"""Model families, one module each: the architecture in config.json, Megatron parameters and their Hugging Face tensors.

`rules.py` defines the rules in a family's table. They are used in both directions: to load, to export, and to reshard
into the engine. `family.py` defines what a family's module contains, `registry.py` lists the families. `shape.py` reads
a model's sizes, `model_tensors.py` names its tensors, `megatron_settings.py` has its settings for Megatron.
"""
