"""Summaries by models: prompts, calls, checks, background jobs, and the queue for worker processes.

`summarizer.py` is the port; `prompt.py` builds requests, `call.py` makes them, `write.py` checks the answers
and `prepare.py` runs all of it in the background until a compaction needs a summary. `queue.py` and
`worker_loop.py` hand the work to other processes.
"""
