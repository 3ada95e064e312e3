"""What a server stores: responses and conversations in a database, and the history of its tools in memory.

`StateStore` is what routes use; `Entries` has the queries of a transaction, which `StateDatabase` runs. Knows no HTTP server.
"""
