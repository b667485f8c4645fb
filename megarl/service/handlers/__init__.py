"""Handlers of the training service's requests, with the sessions of its clients."""
