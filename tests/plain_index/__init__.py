"""The index in plain dicts: what the flat arrays and their kernels are held against.

`key_space.py`, `holder.py`, `ghosts.py` and `prefix_hits.py` say with dicts and loops what their namesakes in
`indexer.index` do, one residency after the other. All else of an index is the real code: `PlainIndex` is one that is
made of both.
"""
