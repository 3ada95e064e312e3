"""Brings a database's tables up to the newest revision, by Alembic. Several servers may do so at once: they take turns."""

from importlib.resources import as_file, files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from jinfercept.errors import ConfigError
from jinfercept.state.tables import ServerRow, StateTable

_LOCK = 0x6A696E66
"""Number of PostgreSQL's advisory lock for migrations."""
_SHOWN = 4
"""Maximum tables in an error."""


def create_tables(engine: Engine) -> None:
    """Create the newest tables in an empty database, without a revision."""
    StateTable.metadata.create_all(engine)


def migrate(engine: Engine, name: str) -> None:
    """Run the migrations that a database lacks, all or none.

    Raises:
        ConfigError: its revision is unknown: a newer version of jinfercept has migrated it; or it is a file of another program.
    """
    with as_file(files("jinfercept.state") / "migrations") as folder, engine.begin() as connection:
        if connection.dialect.name == "postgresql":  # SQLite's transactions take turns by themselves
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config = Config()
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        config.attributes["connection"] = connection
        scripts = ScriptDirectory.from_config(config)
        revisions = {revision.revision for revision in scripts.walk_revisions()}
        heads = MigrationContext.configure(connection).get_current_heads()
        tables = inspect(connection).get_table_names()
        if connection.dialect.name == "sqlite" and tables and ServerRow.__tablename__ not in tables:
            raise ConfigError(
                "the file of the stored state belongs to another program",
                got=f"{name}: with tables {', '.join(sorted(tables)[:_SHOWN])}",
                fix="give another path as --state-url; a new file is created",
            )
        if not revisions.issuperset(heads):
            raise ConfigError(
                "the database of the stored state has tables of a newer version of jinfercept",
                got=f"{name}: revision {', '.join(heads)}",
                fix="start that version or a newer one, or give another --state-url",
            )
        if set(heads) != set(scripts.get_heads()):
            command.upgrade(config, "head")
