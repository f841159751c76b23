"""Training rows that are read, tokenised and packed while a run trains, in an order that ranks, workers and
stops do not change."""
