"""Model families, one module each in `pages`: architecture, Megatron parameters and their Hugging Face tensors.

`family.py` defines what a family's module contains, `registry.py` lists the families. `tensors/rules.py` defines the
rules in a family's table; they are used to load, to export, and to reshard into the engine. `config_json` reads single
values of config.json, `shape.py` a model's sizes. `model_tensors.py` names its tensors, `megatron_settings.py` has its
settings for Megatron.
"""
