"""Runs as a live page on this machine: `columns.py` and `feed.py` read what is new, `page.py` lays it out, `server.py`
answers. Charts and images are those of the report. No torch."""
