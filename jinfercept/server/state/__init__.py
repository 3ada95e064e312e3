"""Stored state that outlives a server: tables, migrations, and the functions that read and write them. Knows no HTTP server.

Everything is reached through `database.StateDatabase`; the modules `*_rows` have the queries, which run in its threads.
"""
