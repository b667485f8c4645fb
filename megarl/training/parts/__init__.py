"""Optional parts of a trained model, each behind the interface `EnginePart`."""
