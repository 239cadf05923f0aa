"""Settings of a run: the sections, and how presets, files and options become one configuration."""
