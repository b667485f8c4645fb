"""Observers of a run's steps: checks, instabilities, weight checks, the canary, records.

`step_observer` has their interface, and `selection` chooses them and states their order.
"""
