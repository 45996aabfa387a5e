"""The scenarios of the plan (R31): each is a configuration, a way to run it, and a checklist (`penstock scenario`)."""
