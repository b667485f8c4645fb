"""Distillation by distributions: teachers, their targets, and the policy's objective."""
