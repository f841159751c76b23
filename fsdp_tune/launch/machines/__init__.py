"""The machines of one run: how they find each other, what must be equal on all of them, and how they agree on
each launch."""
