"""The HTTP front: takes jobs in, hands results out, keeps no state that the spool does not have."""
