"""Models of distillation by distributions, and the divergence of their distributions."""
