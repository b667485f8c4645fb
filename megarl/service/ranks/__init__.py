"""Ranks of the training service: many models' adapters on one trainer."""
