"""Turn a run into a job of a cluster's engine. Values in, text out: the engines are called by
`jobs/submit.py`."""
