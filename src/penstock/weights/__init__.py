"""Weight versions, and their transport from the trainer to the engines' workers."""
