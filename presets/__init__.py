"""Shipped presets: TOML files of settings for backbones, methods and benchmarks."""
