"""Arms x seeds: planning, running and comparing studies."""
