"""What alembic runs: the migrations, on the connection that `database.py` gives."""

from alembic import context

from penstock.tinker.database import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
