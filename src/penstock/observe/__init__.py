"""Run records, metrics, plots, live display."""
