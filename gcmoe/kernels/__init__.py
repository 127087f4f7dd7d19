"""Device code, one file per role and architecture, and the compiler of it. Never launches."""
