"""Changes of the tables, in order; alembic applies those that a database lacks."""
