"""Starting, supervising and ending the worker processes, on one node or several."""
