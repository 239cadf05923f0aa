"""Who is asked: a model loaded here, or a server."""
