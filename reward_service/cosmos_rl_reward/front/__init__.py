"""The HTTP front: accepts jobs, returns results, keeps no state that the spool does not have."""
