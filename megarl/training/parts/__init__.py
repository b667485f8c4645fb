"""Optional parts of a trained model, such as LoRA, each behind the interface `EnginePart`."""
