"""Run by Alembic for each migration: uses the connection and the transaction of `migrate.migrate`."""

from alembic import context

from jinfercept.state.tables import StateTable

context.configure(connection=context.config.attributes["connection"], target_metadata=StateTable.metadata)
context.run_migrations()
