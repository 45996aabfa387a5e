"""A service for the Tinker SDK: LoRA training and sampling on one fleet (docs/tinker.md)."""
