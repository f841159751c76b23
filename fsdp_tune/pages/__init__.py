"""HTML pages that open from disk: what they have in common, and the report about runs."""
