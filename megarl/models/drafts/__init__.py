"""Models that draft tokens for the engine and learn from the policy: its draft layers, and EAGLE-3 drafters."""
