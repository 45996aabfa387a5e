"""A service that the Tinker SDK runs against: training and sampling of LoRA models on one fleet (docs/tinker.md)."""
