"""Order of the training service's work: full queues refuse, requests run once, tenants take turns on the ranks."""
