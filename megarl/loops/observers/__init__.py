"""Observers of a run's steps: checks, instabilities, weight checks, the canary, records, comparison with the plan.

`step_observer` has their interface, and `selection` chooses them and states their order.
"""
