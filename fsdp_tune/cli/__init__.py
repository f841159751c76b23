"""The command line: parse, call one job, render. Nothing here computes; nothing below prints."""
