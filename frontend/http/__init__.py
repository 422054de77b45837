"""What every HTTP API here shares: the application, body reading, server-sent events."""
