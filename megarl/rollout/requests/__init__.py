"""Requests to the engines: `engine_requests` has their types, `queues` those that wait, `request_table` all of them."""
