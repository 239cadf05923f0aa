"""One page per run and per study: self-contained HTML that needs no network."""
