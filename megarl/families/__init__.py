"""Model families: architecture, Megatron parameters and their Hugging Face tensors. Each family has a module in
`pages`.

`family` defines the contents of such a module, and `registry` lists the families. `tensors.rules` composes a Megatron
parameter of Hugging Face tensors; loading, export and reshards use these rules. `config_json` reads single values of
config.json, and `shape` a model's sizes. `model_tensors` names a model's tensors. `megatron_settings` has its settings
for Megatron.
"""
