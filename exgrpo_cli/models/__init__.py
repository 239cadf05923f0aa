"""Language models: loading, the built-in tiny one, export."""
