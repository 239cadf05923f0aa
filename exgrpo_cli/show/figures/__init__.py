"""Figures: one look, a few shapes, and what is drawn with them."""
