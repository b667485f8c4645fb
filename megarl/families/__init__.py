"""Model families: architecture, Megatron parameters and their Hugging Face tensors. Each has a module in `pages`.

`family` defines the contents of a family's module, `registry` lists the families. `tensors.rules` defines how a
Megatron parameter is composed; loading, export and reshards use these rules. `config_json` reads single values of
config.json, `shape` a model's sizes. `model_tensors` names a model's tensors, `megatron_settings` has its settings for
Megatron.
"""
