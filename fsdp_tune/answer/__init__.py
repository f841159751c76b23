"""Use a finished model: score it on rows of data (`evaluate`), and let it answer prompts (`generate`,
`chat`)."""
