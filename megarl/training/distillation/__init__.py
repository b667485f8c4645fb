"""Distillation from a teacher's whole distributions: teachers, their targets, and the policy's objective."""
