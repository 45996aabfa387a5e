"""The scenarios of the plan (R31). Each has a configuration, a way to run it, and a checklist."""
