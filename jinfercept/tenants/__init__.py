"""Fair shares between tenants: turns at slots for work, and parts of a limited store.

Knows tenants by their names, and nothing of requests or servers.
"""
