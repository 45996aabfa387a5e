"""Learner, losses, advantages, staleness, schedules."""
