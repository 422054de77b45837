"""The prefix cache: KV of earlier prompts, kept as records in RAM and on disk, and put into new rows."""
