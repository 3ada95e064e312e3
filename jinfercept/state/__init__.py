"""What a server stores: responses, conversations and waiting calls in a database, and the history of its tools in memory.

The rows are reached through `database.StateDatabase`; the modules `*_rows` have the queries, which run in its threads. Knows no
HTTP server.
"""
