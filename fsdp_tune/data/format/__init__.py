"""Convert rows to one of three forms: joined text, a chat, or token ids."""
