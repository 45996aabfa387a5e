"""Generators and environments: prompts to trajectories."""
