"""Observers of a run's steps: checks, instabilities, weight checks, the canary, records, comparison with the plan.

`step_observer` has their interface. `selection` chooses them and their order.
"""
