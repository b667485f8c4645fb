"""Agents of users: programs or classes that sample through the endpoint, in containers, with their rewards."""
