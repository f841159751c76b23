"""The stream from shards to the output."""
