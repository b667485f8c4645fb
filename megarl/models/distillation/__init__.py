"""Models for distillation from a teacher's whole distributions, and the divergence of two models' distributions."""
