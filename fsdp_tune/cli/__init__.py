"""The surface: parses, calls one engine, renders. Nothing here computes; nothing below prints."""
