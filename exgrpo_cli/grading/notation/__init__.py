"""Reading what golds and responses write: boxes, numerals, units, lists."""
