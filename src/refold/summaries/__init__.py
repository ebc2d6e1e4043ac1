"""Summaries by models: what is asked, who writes, how the answer is checked, and who waits for it.

`summarizer.py` is the port; `prompt.py` builds a request, `write.py` gets and checks an answer,
`prepare.py` does so in the background until a summary is needed. `queue.py` and `worker_loop.py` hand the
work to other processes.
"""
